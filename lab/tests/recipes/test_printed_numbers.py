"""The numbers that README, the summary of lessons and other pages print are those of the records."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from kvshift_lab.core.json_lines import read_lines
from kvshift_lab.recipes.catalogue import find_recipe
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.recipe import Record, without_tuning_runs
from kvshift_lab.study.records import read_records

ROOT = Path(__file__).parents[3]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?")

# Recipe (with its preset, if not laptop), statement of its claim, page, and what it prints of the measurement's numbers
PRINTED = [
    (
        "decide",
        "Mean over 2, 4, 8 layers: KV shift has a lower loss",
        "README.md",
        "**{0:.3f}** nats per token (mean over the depths, 95 % interval {2:.3f} to {3:.3f})",
    ),
    (
        "decide",
        "Mean over 2, 4, 8 layers: KV shift has a lower loss",
        "docs/lessons.md",
        "{0:.3f} lower ({2:.3f} to {3:.3f}; mean over 2, 4 and 8 layers; {4:.0f} seeds)",
    ),
    (
        "both_copy",
        "After repeated text, 2 layers: at the end, KV shift has a loss lower",
        "README.md",
        "{0:.3f} nats with two layers",
    ),
    (
        "both_copy deeper",
        "After repeated text, 4 layers: at the end, KV shift has a loss lower",
        "README.md",
        "{0:.3f} with four",
    ),
    (
        "both_copy deeper",
        "After repeated text, 4 layers: at the end, KV shift has a loss lower",
        "docs/lessons.md",
        "{0:.3f} lower ({1:.3f} to {2:.3f}) with four layers",
    ),
    (
        "both_copy deeper",
        "After repeated text, 4 layers: at the end, KV shift has a lower loss than a scale",
        "docs/lessons.md",
        "{0:.3f} lower ({1:.3f} to {2:.3f}) with four.",
    ),
    (
        "both_copy",
        "After repeated text, 2 layers: at the end, KV shift has a lower loss than a scale",
        "docs/lessons.md",
        "{0:.3f} lower ({1:.3f} to {2:.3f}) than that control with two layers",
    ),
    (
        "both_copy",
        "After repeated text, 2 layers: at the end, KV shift has a loss lower",
        "docs/lessons.md",
        "{0:.3f} lower ({1:.3f} to {2:.3f}) after 6 million tokens",
    ),
    (
        "fig01a",
        "One layer with KV shift reaches 90 % in at most half",
        "README.md",
        "{1:.3f} of the steps of two layers without it (95 % interval {4:.3f} to {5:.3f})",
    ),
    (
        "fig01a",
        "One layer with KV shift reaches 90 % in at most half",
        "docs/lessons.md",
        "{1:.3f} ({4:.3f} to {5:.3f}; {6:.0f} seeds)",
    ),
    (
        "fig01b",
        "At width 8, one layer with KV shift is ahead",
        "docs/lessons.md",
        "{6:.1f} % right ({8:.1f} to {9:.1f}; {10:.0f} seeds)",
    ),
    (
        "mqar",
        "32 tokens, width 64: of two layers, those with KV shift",
        "docs/lessons.md",
        "{1:.3f} of the steps of two plain ones ({4:.3f} to {5:.2f}; {6:.0f} seeds)",
    ),
    (
        "keys_values",
        "At the end, KV-shift, 2 layers: a lower loss than V-shift",
        "docs/lessons.md",
        "{1:.4f} higher than both ({3:.4f} to {4:.4f})",
    ),
    (
        "keys_values",
        "At the end, KV-shift, 2 layers: a lower loss than K-shift",
        "docs/lessons.md",
        "({2:+.3f}, {4:+.3f} to {5:+.3f})",
    ),
    (
        "encoder",
        "After 4,000 steps, shift from both: a lower loss than with no shift",
        "docs/lessons.md",
        "{0:.3f} lower ({2:.3f} to {3:.3f}; {4:.0f} seeds)",
    ),
]


@cache
def records_of(name: str, preset: str = "laptop") -> tuple[Record, ...]:
    runs = find_recipe(name).entry.runs
    return tuple(without_tuning_runs(read_records(ROOT / "results" / runs / f"{preset}.jsonl")))


@cache
def claims_of(name: str, preset: str = "laptop") -> tuple[Claim, ...]:
    return tuple(find_recipe(name).claims(records_of(name, preset)))


def page_text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("name", "statement", "page", "text"), PRINTED, ids=lambda value: str(value)[-40:])
def test_a_measurement_is_printed_as_it_is(name: str, statement: str, page: str, text: str) -> None:
    (claim,) = (claim for claim in claims_of(*name.split()) if claim.statement.startswith(statement))
    expected = text.format(*map(float, NUMBER.findall(claim.ours)))
    assert page_text(page).count(expected) == 1, f"{expected}, from {claim.ours}"


def test_gains_by_kind_of_target_and_what_was_run() -> None:
    kinds = {
        depth: float(NUMBER.findall(claim.ours)[0])
        for depth in (2, 4, 8)
        for claim in claims_of("decide")
        if claim.statement.startswith(f"{depth} layers, at the end, pairs seen")
    }
    low, high = min(kinds.values()), max(kinds.values())
    runs = records_of("decide")
    lower, pairs = 0, {(record.arm.layers, record.seed) for record in runs}
    for layers, seed in pairs:
        last = {
            record.arm.variant: record.curve["loss"][-1]
            for record in runs
            if (record.arm.layers, record.seed) == (layers, seed)
        }
        lower += last["kv-shift"] < last["vanilla"]  # type: ignore[operator]
    assert lower == len(pairs)
    for page in ("README.md", "docs/lessons.md"):
        text = page_text(page)
        assert f"{low:.2f} to {high:.2f}" in text
        assert f"in all {lower} pairs" in text


def test_which_runs_were_made_on_a_gpu() -> None:
    runs = read_records(ROOT / "results/decide/laptop.jsonl")
    on_a_gpu = [record for record in runs if "NVIDIA" in str(record.environment["hardware"]["device"])]
    assert f"{len(on_a_gpu)} of the {len(runs)} runs of `decide`" in page_text("docs/lessons.md")


def test_a_token_of_generation() -> None:
    rows = read_lines(ROOT / "results/host/2026-11-28-projections.jsonl")
    ratios = {row["cache"]: row["ratio"] for row in rows if row["model"] == "kv shift"}
    expected = (
        f"a token takes {ratios['dynamic']:.2f} times as long as with transformers' own Llama on a CPU, "
        f"{ratios['static']:.2f} with a static cache"
    )
    assert expected in page_text("README.md")
