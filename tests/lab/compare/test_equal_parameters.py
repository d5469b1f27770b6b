"""`kvshift compare --equal-parameters`: variants that add parameters get narrower MLPs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshift.lab.compare.compare import CompareConfig, child_config, compare
from kvshift.lab.core.errors import LabError
from kvshift.lab.training.train_config import TrainConfig
from kvshift.lab.variants.building import build_model, describe
from kvshift.lab.variants.by_name import VARIANTS
from kvshift.lab.variants.model_config import ModelConfig

UNIT = 3 * 24 * 2  # parameters of all layers per unit of MLP width


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "differential-wide"])  # needs even KV heads
def test_of_what_is_built(name: str, tmp_path: Path) -> None:
    model = ModelConfig(hidden_size=24, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    train = TrainConfig(out=tmp_path, model=model)

    def built(variant: str, **how: Any) -> tuple[int, int]:
        """Return the number of parameters and the width of the MLPs."""
        options = child_config(train, 0, variant, **how).model
        size: Any = describe(options, vocab_size=31, length=8)
        return build_model(size, seed=0, variant=options.variant).num_parameters(), size.intermediate_size

    vanilla, before = built("vanilla"), built(name)
    parameters, width = built(name, equal_parameters=True)
    assert abs(parameters - vanilla[0]) <= UNIT / 2
    assert before[0] - parameters == (before[1] - width) * UNIT
    assert (width < before[1]) == (before[0] - vanilla[0] > UNIT / 2)


def comparison(out: Path, **how: Any) -> CompareConfig:
    """Return options for runs of two steps, without samples and step times."""
    model = ModelConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=1)
    train = TrainConfig(
        out=out, model=model, steps=2, batch_size=2, eval_rows=2, eval_every=2, log_every=1, report_to=(), device="cpu"
    )
    data = replace(train.data, vocab_size=257, sequence_length=8)
    names = ("vanilla", "canon", "fox-shift", "kv-shift")
    options: dict[str, Any] = {"variants": names, "step_time_seconds": 0, "sample_tokens": 0, **how}
    return CompareConfig(train=replace(train, data=data), **options)


@pytest.mark.slow
def test_it_compares_them_and_remembers(tmp_path: Path) -> None:
    found = compare(comparison(tmp_path / "out", equal_parameters=True))
    runs = (tmp_path / "out" / "seed-0").glob("*.json")
    widths = {run.stem: json.loads(run.read_text())["model"]["intermediate_size"] for run in runs}
    assert widths["canon"] < 64
    assert widths["foxshift"] < 64
    assert (widths["kvshift"], widths["vanilla"]) == (None, None)
    counts = found["parameters"].values()
    assert max(counts) - min(counts) <= 3 * 24
    with pytest.raises(LabError, match="equal_parameters: True there, None here"):
        compare(comparison(tmp_path / "out"))


def test_beside_init_from_it_is_refused(tmp_path: Path) -> None:
    config = comparison(tmp_path / "out", equal_parameters=True, variants=("vanilla", "kv-shift"))
    config = replace(config, train=replace(config.train, init_from="llama"))
    with pytest.raises(LabError, match="equal_parameters cannot be combined with init_from"):
        compare(config)
