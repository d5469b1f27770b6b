"""The known faults of transformers' own models are found, and docs/check.md lists the faults that were found."""

import json
from pathlib import Path

import pytest
import transformers

from kvshift_lab.check import PROPERTIES, check_model
from kvshift_lab.check.check_page import MARKER
from kvshift_lab.check.stock_models import GROUPS, STOCK, build_stock, is_known

ROOT = Path(__file__).parents[3]
ROWS = ROOT / "results/check/transformers.jsonl"

# Documents that position_ids mark are kept apart only where there is neither a mask nor a cache.
BESIDE = {
    "documents: position_ids, mask",
    "documents: position_ids, cache",
    "documents: several rows, cache",
    "documents: padding",
    "documents: padding, cache",
    "documents: chunked prefill",
}
BEGINS = {("document 1", 3), ("3 rows, document 1", 3), ("left padding, document 1", 10)}
NAMES = {
    "documents: seq_idx",
    "documents: cu_seq_lens",
    "documents: several rows, seq_idx",
    "documents: padding, seq_idx",
}
# Convolutions receive no document boundaries, and no padding mask in calls of a single token.
LEAKS = {
    "documents: position_ids",
    *BESIDE,
    "documents: several rows",
    "documents: gradients",
    "cache: chunked prefill",
}
KNOWN = {
    "llama": (BESIDE, NAMES),
    "gpt2": (BESIDE, {*NAMES, "left padding: mask alone"}),
    "inkling_text": (
        {*LEAKS, "documents: all of these", "cache: right padding", "cache: static", "generate: static cache"},
        NAMES,
    ),
    "lfm2": (
        {*LEAKS, "cache: right padding"},
        {*NAMES, "documents: all of these"},  # refused without the package causal_conv1d
    ),
}
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):  # the oldest supported version
    wrong, names = KNOWN["inkling_text"]
    embeds = {name for name in PROPERTIES if "inputs_embeds" in name}
    KNOWN["inkling_text"] = ({*wrong, *embeds, "generate: assisted", "generate: prompt lookup"}, names)
    KNOWN["lfm2"] = ({*KNOWN["lfm2"][0], "documents: all of these"}, NAMES)  # this version ignores seq_idx


def verdicts_of(name: str) -> tuple[set[str], set[str]]:
    """Return the properties that are wrong, and those that are refused or not supported."""
    report = check_model(build_stock(name), length=16)
    others = {verdict.property for verdict in report.verdicts if verdict.verdict in ("refused", "not supported")}
    for verdict in report.wrong:
        if verdict.property in BESIDE | {"documents: position_ids"}:
            assert (verdict.first["case"], verdict.first["position"]) in BEGINS
    return {verdict.property for verdict in report.wrong}, others


def test_what_is_known_of_llama_is_found():
    assert verdicts_of("llama") == KNOWN["llama"]


@pytest.mark.parametrize("name", ["gpt2", "inkling_text", "lfm2"])
@pytest.mark.slow
def test_what_is_known_is_found(name):
    if not is_known(name):
        pytest.skip(f"this transformers has no {name}")
    assert verdicts_of(name) == KNOWN[name]


def test_every_model_stands_in_one_group():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(STOCK)


@pytest.mark.slow
@pytest.mark.parametrize("name", STOCK)
def test_every_model_can_be_built(name):
    if not is_known(name):
        pytest.skip(f"this transformers has no {name}")
    assert sum(parameter.numel() for parameter in build_stock(name).parameters()) < 10_000_000


def test_every_model_has_a_row_of_every_property():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert [row["name"] for row in rows] == list(STOCK)
    assert all([verdict["property"] for verdict in row["verdicts"]] == list(PROPERTIES) for row in rows)


def test_the_page_names_every_property():
    page = (ROOT / "docs/check.md").read_text().partition(MARKER)[0]
    assert not [name for name in PROPERTIES if f"| {name} |" not in page]
