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

The main claims about KV shift, and what our runs say of each. This page is made from the same records as the
[results](results.md), which have every claim, setting and figure. Models here have at most a few million parameters and
train on two CPU cores: a verdict is about the direction of an effect at that size. Intervals are 95 %, over seeds.
"""

_WORDS: dict[Direction, str] = {
    "holds": "shown",
    "fails": "contradicted",
    "not shown": "not shown",
    "not testable here": "not testable here",
}


@dataclass(frozen=True)
class Main:
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


def _read_main() -> tuple[Main, ...]:
    with Path(__file__).with_name("summary.csv").open(encoding="utf-8", newline="") as file:
        return tuple(Main(**row) for row in csv.DictReader(file))


MAIN = _read_main()
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
    for main in MAIN:
        recipe = find_recipe(main.recipe)
        key = (main.recipe, main.preset)
        if key not in claims:
            records = load_records(results, recipe, main.preset)
            claims[key] = (
                ([], [])
                if records is None
                else (without_tuning_runs(records), recipe.claims(without_tuning_runs(records)))
            )
        shown, found = claims[key]
        if not shown:
            continue
        ours = [claim for claim in found if claim.statement.startswith(main.statement)]
        if len(ours) != 1:
            raise LabError(f"{main.recipe} {main.preset} must have one claim {main.statement!r} ..., got {len(ours)}")
        seeds = str(len({record.seed for record in shown}))
        link = f"[{main.recipe}](results.md#{anchor(recipe, main.preset)})"
        rows.append((main.words, ours[0].ours, f"**{_WORDS[ours[0].direction]}**", seeds, link))
    return f"{_HEAD}\n{as_markdown(rows, left=None)}\n"
