"""Variants by name: the options that a name stands for, the label of options, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvshift_lab.analysis.colors import colors_of
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import to_json
from kvshift_lab.run.train_config import TrainConfig, config_hash
from kvshift_lab.variants.by_name import (
    VARIANTS,
    find_variant,
    label_of,
    resolve_variant,
    shift_label,
    variant_of,
    with_variant,
)
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.small_gpt2 import GPT2Options

SIZES = [ModelConfig(hidden_size=24), GPT2Options(width=24)]
sizes = pytest.mark.parametrize("size", SIZES, ids=["llama", "gpt2"])


@sizes
@pytest.mark.parametrize("name", VARIANTS)
def test_a_name_comes_back_from_what_is_recorded(size: ModelConfig | GPT2Options, name: str) -> None:
    made = with_variant(size, name)
    assert resolve_variant(replace(size, variant=name)) == resolve_variant(made) == made
    recorded = to_json(made)
    assert variant_of(recorded) == name
    assert label_of(recorded) == VARIANTS[name].label


@sizes
def test_vanilla_and_kv_shift_are_said_as_ever(size: ModelConfig | GPT2Options) -> None:
    assert with_variant(size, "vanilla") == replace(size, shift_targets=())
    assert with_variant(size, "kv-shift") == replace(size, shift_targets=("k", "v"))
    assert resolve_variant(size) == size


@sizes
def test_what_refines_a_shift_stays_where_something_shifts(size: ModelConfig | GPT2Options) -> None:
    refined = replace(size, shift_targets=("v",), shift_window=3, shift_init="identity", freeze_shift=True)
    assert with_variant(refined, "kv-shift") == refined == resolve_variant(replace(refined, variant="kv-shift"))
    assert with_variant(refined, "vanilla") == with_variant(size, "vanilla")


@sizes
@pytest.mark.parametrize(
    ("name", "targets", "window", "constraint"),
    [
        ("k-shift", ("k",), 2, "free"),
        ("v-shift", ("v",), 2, "free"),
        ("qkv-shift", ("q", "k", "v"), 2, "free"),
        ("kv-shift-window-3", ("k", "v"), 3, "free"),
        ("kv-shift-window-4", ("k", "v"), 4, "free"),
        ("kv-shift-gate", ("k", "v"), 2, "gate"),
        ("kv-shift-clamp", ("k", "v"), 2, "clamp"),
    ],
)
def test_a_name_that_says_options_of_the_shift_is_these_options(
    size: ModelConfig | GPT2Options, name: str, targets: tuple, window: int, constraint: str
) -> None:
    said = {"shift_targets": targets, "shift_window": window, "shift_constraint": constraint}
    assert with_variant(size, name) == resolve_variant(replace(size, variant=name)) == replace(size, **said)
    assert variant_of(to_json(replace(size, **said))) == name
    refined = replace(size, shift_init="identity", freeze_shift=True)
    assert with_variant(refined, name) == replace(refined, **said)
    assert find_variant(name) is find_variant("kv-shift")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"variant": "kvshift"}, r"model\.variant: there is no variant 'kvshift'; did you mean kv-shift\?"),
        ({"variant": "vanilla", "shift_window": 3}, r"model\.shift_window is 3, but model\.variant is vanilla"),
        ({"shift_targets": (), "shift_window": 3}, r"shift_window is 3, but model\.shift_targets is empty"),
        ({"variant": "vanilla", "freeze_shift": True}, r"model\.freeze_shift is True, but model\.variant is vanilla"),
        ({"variant": "kv-shift", "shift_targets": ()}, r"model\.shift_targets must name at least one of q, k, v"),
        ({"variant": "k-shift", "shift_targets": ()}, r"model\.shift_targets must name at least one of q, k, v"),
        ({"variant": "k-shift", "shift_targets": ("v",)}, r"shift_targets is \('v',\), .* is k-shift, .* \('k',\)"),
        ({"variant": "kv-shift-window-4", "shift_window": 3}, r"shift_window is 3, .* kv-shift-window-4, .* is 4"),
    ],
    ids=str,
)
def test_contradictions_are_named(options: dict, said: str) -> None:
    with pytest.raises(LabError, match=said):
        resolve_variant(ModelConfig(**options))


@pytest.mark.parametrize("name", [None, "vanilla", "smear"])
def test_what_a_run_without_shift_records_may_be_given_again(name: str | None) -> None:
    options = with_variant(ModelConfig(), "vanilla")
    recorded = replace(options, shift_window=2, shift_constraint="free", shift_init="uniform")
    assert resolve_variant(replace(recorded, variant=name)).shift_targets == ()


def test_digests_of_runs_from_before_there_were_others() -> None:
    options = to_json(TrainConfig(out="x"))
    before = {**options, "model": {name: value for name, value in options["model"].items() if name != "variant"}}
    assert config_hash(options) == config_hash(before) == "d01c4654aef2aed7"
    assert config_hash({**options, "model": {**options["model"], "variant": "other"}}) != config_hash(options)


def test_labels_of_a_shift() -> None:
    assert [shift_label(targets) for targets in ("", "k", "qkv")] == ["vanilla", "K-shift", "QKV-shift"]
    assert label_of({"shift_targets": ["v"]}) == "V-shift"
    assert label_of({"shift_targets": None}) == "KV-shift"
    assert label_of({"shift_targets": ["v"], "shift_window": 3, "shift_constraint": "clamp"}) == (
        "V-shift, window 3, clamp"
    )
    assert variant_of({"shift_targets": ["v"], "shift_window": 3}) == "kv-shift"


def test_every_variant_has_a_color_of_its_own_in_every_figure() -> None:
    labels = [entry.label for entry in VARIANTS.values()]
    assert colors_of(labels) == {entry.label: entry.color for entry in VARIANTS.values()}
    assert len(set(colors_of(labels).values())) == len(labels)


def test_every_variant_has_its_line_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs/variants.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert sorted(name for cell in cells for name in re.findall(r"`([^`]+)`", cell)) == sorted(VARIANTS)
