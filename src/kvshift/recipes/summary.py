"""`docs/summary.md`, the main claims on one screen: summary.csv selects and words them, the recipes decide them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvshift.lab.analysis.tables import as_markdown
from kvshift.lab.core.errors import LabError
from kvshift.lab.study.claims import Claim, Direction
from kvshift.lab.study.recipe import Recipe, Record, without_tuning_runs
from kvshift.lab.study.records import load_records
from kvshift.recipes.catalogue import find_recipe

_HEAD = """# Summary

The main claims about KV shift, and our verdict on each. This page is made from the same records as the
[results](results.md), which have every claim, setting and figure. Models here have at most a few million parameters, so
a verdict is about the direction of an effect at that size. Intervals are 95 %, over seeds.

On text, models with KV shift have a lower loss at 2, 4 and 8 layers in every pair of runs of `decide`, by more than the
margin that was written down before. The gain is on pairs of tokens that were seen before: every model with the shift
begins to copy from its context within the training, and none without it does. Whether a gain remains once plain
attention copies too is not known, because no plain model that we trained on text has begun to.
"""

_WORDS: dict[Direction, str] = {
    "holds": "shown",
    "fails": "contradicted",
    "not shown": "not shown",
    "not testable here": "not testable here",
}


@dataclass(frozen=True)
class SummaryRow:
    """One row of the summary.

    Attributes:
        words: wording of the claim in the summary.
        recipe, preset: the recipe and preset that decide the claim.
        statement: the beginning of the claim's statement in that recipe.
    """

    words: str
    recipe: str
    preset: str
    statement: str


def _read_summary_rows() -> tuple[SummaryRow, ...]:
    with Path(__file__).with_name("summary.csv").open(encoding="utf-8", newline="") as file:
        return tuple(SummaryRow(**row) for row in csv.DictReader(file))


SUMMARY_ROWS = _read_summary_rows()
"""Rows in the order of the page; a row is omitted if its recipe has not been run."""


def summary_page(results: Path, anchor: Callable[[Recipe, str], str]) -> str:
    """Return the text of `docs/summary.md`.

    Args:
        results: folder with RECIPE/PRESET.jsonl.
        anchor: returns the anchor of the section of a recipe and preset in `docs/results.md`.

    Raises:
        LabError: a recipe that has been run does not have exactly one claim that begins with a row's `statement`.
    """
    rows: list[tuple[str, ...]] = [("claim", "ours", "verdict", "seeds", "recipe")]
    claims: dict[tuple[str, str], tuple[Sequence[Record], Sequence[Claim]]] = {}
    for row in SUMMARY_ROWS:
        recipe = find_recipe(row.recipe)
        key = (row.recipe, row.preset)
        if key not in claims:
            records = load_records(results, recipe, row.preset)
            claims[key] = (
                ([], [])
                if records is None
                else (without_tuning_runs(records), recipe.claims(without_tuning_runs(records)))
            )
        shown, found = claims[key]
        if not shown:
            continue
        ours = [claim for claim in found if claim.statement.startswith(row.statement)]
        if len(ours) != 1:
            raise LabError(f"{row.recipe} {row.preset} must have one claim {row.statement!r} ..., got {len(ours)}")
        seeds = str(len({record.seed for record in shown}))
        link = f"[{row.recipe}](results.md#{anchor(recipe, row.preset)})"
        rows.append((row.words, ours[0].ours, f"**{_WORDS[ours[0].direction]}**", seeds, link))
    return f"{_HEAD}\n{as_markdown(rows, left=None)}\n"
