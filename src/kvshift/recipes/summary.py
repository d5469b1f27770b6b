"""The main claims on one screen, `docs/summary.md`: chosen and worded here, decided by recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvshift.lab.analysis.tables import as_markdown
from kvshift.lab.core.errors import LabError
from kvshift.lab.study.claims import Claim, Direction
from kvshift.lab.study.recipe import Recipe, Record, reported
from kvshift.lab.study.records import kept_records
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
    """One row.

    Attributes:
        words: the claim.
        recipe, preset: whose claim it is.
        statement: how that claim begins there.
    """

    words: str
    recipe: str
    preset: str
    statement: str


MAIN = (
    Main("One layer with KV shift learns induction", "fig01a", "laptop", "One layer with KV shift learns induction"),
    Main(
        "... in at most half the steps of two plain layers", "fig01a", "laptop", "One layer with KV shift reaches 90 %"
    ),
    Main(
        "Gradient descent on the loss of induction leads to α = (0, 1), β = (1, 0)",
        "fig02",
        "paper",
        "Descent leads to induction",
    ),
    Main(
        "Fewer errors when hopping from letter to letter (4 layers)",
        "fig08",
        "laptop",
        "With 4 layers, KV shift makes fewer errors",
    ),
    Main("No difference in memorizing triples", "fig09", "laptop", "At 3.2M parameters KV shift changes how much"),
    Main(
        "No difference in learning a grammar, in the end",
        "cfg",
        "long",
        "After 24,000 steps, KV shift changes the validation loss",
    ),
    Main(
        "... nor in how soon it is learned",
        "cfg",
        "laptop",
        "How soon: after 2,400 steps, KV shift changes the validation loss",
    ),
    Main(
        "Grade-school problems: more are answered right",
        "tab04",
        "laptop",
        "KV shift answers more problems right, Tr4-Te5",
    ),
    Main(
        "A lower loss on text (small models, mean over four sizes and contexts; chosen after the data had been seen)",
        "tab07",
        "laptop",
        "Mean over 4 places",
    ),
    Main("A lower loss at 8 layers, too", "depth", "laptop", "After 600 steps, 8 layers"),
    Main("A lower loss at every size", "fig06", "laptop", "KV-shift has a lower loss than vanilla at every size"),
    Main(
        "Keys and values both matter (against values alone)",
        "tab10",
        "laptop",
        "Mean over 4 places, by seed: KV-shift has a lower loss than V-shift",
    ),
    Main(
        "Training stays stable at rates at which vanilla diverges",
        "fig04",
        "laptop",
        "At the paper's rate 0.01, vanilla diverges",
    ),
    Main("Better answers to benchmarks at 2.9B and 19B", "fig03", "laptop", "19B: KV-shift scores higher"),
    Main(
        "On real text, two layers with KV shift begin to copy sooner",
        "phase",
        "laptop",
        "KV-shift, 2 layers: a prefix matching",
    ),
    Main("The gain survives plain attention's own change", "phase", "laptop", "2 layers: the gain survives"),
    Main(
        "A lower loss on text at 2, 4 and 8 layers, as written down before the runs",
        "decide",
        "laptop",
        "Mean over 2, 4, 8 layers: KV shift has a lower loss",
    ),
)
"""In the order of the page; of a recipe that has not been run, nothing is said."""


def summary_page(results: Path, anchor: Callable[[Recipe, str], str]) -> str:
    """The text of `docs/summary.md`.

    Args:
        results: folder with RECIPE/PRESET.jsonl.
        anchor: of the section of a recipe and preset in `docs/results.md`.

    Raises:
        LabError: a recipe has been run, and has not exactly one claim that begins so.
    """
    rows: list[tuple[str, ...]] = [("claim", "ours", "verdict", "seeds", "recipe")]
    claims: dict[tuple[str, str], tuple[Sequence[Record], Sequence[Claim]]] = {}
    for main in MAIN:
        recipe = find_recipe(main.recipe)
        key = (main.recipe, main.preset)
        if key not in claims:
            records = kept_records(results, recipe, main.preset)
            claims[key] = ([], []) if records is None else (reported(records), recipe.claims(reported(records)))
        shown, found = claims[key]
        if not shown:
            continue
        ours = [claim for claim in found if claim.statement.startswith(main.statement)]
        if len(ours) != 1:
            raise LabError(f"{main.recipe} {main.preset} must have one claim {main.statement!r} ..., has {len(ours)}")
        seeds = str(len({record.seed for record in shown}))
        link = f"[{main.recipe}](results.md#{anchor(recipe, main.preset)})"
        rows.append((main.words, ours[0].ours, f"**{_WORDS[ours[0].direction]}**", seeds, link))
    return f"{_HEAD}\n{as_markdown(rows, left=None)}\n"
