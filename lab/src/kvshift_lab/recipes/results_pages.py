"""Markdown pages made from the saved records: one page per recipe, `docs/results.md` and `docs/summary.md`.

    python -m kvshift_lab.recipes.results_pages [--check]

reads `results/` in the working directory and writes `results/RECIPE/page.md` and `results/RECIPE/PRESET.svg`,
`docs/results.md`, `docs/summary.md`, and the figure of the README's comparison. With --check it writes nothing and
fails if a page differs from what the records give.

The pages, figures and records of recipes that are archived stay as they are; `results/RECIPE/archived.json` has their
claims and the commit at which they can be repeated.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvshift_lab.analysis.curves import plot_curves, save_figure
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.core.atomic import write_bytes
from kvshift_lab.core.errors import LabError
from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe
from kvshift_lab.study.claims import Claim, Direction
from kvshift_lab.study.preset_report import rates_of, section, verdict_text
from kvshift_lab.study.recipe import Recipe, Record, without_tuning_runs
from kvshift_lab.study.records import load_records

_HEAD = """# Results

The paper's claims beside what we measured. This page is made from `results/` by `make results`; nothing in it is
written by hand. Each link leads to the recipe's page with its figure, setting, learning rates and notes. `kvshift
reproduce RECIPE --preset PRESET` runs any of it again, except for archived recipes, whose pages name the commit at
which they can be repeated.

The verdict is "holds" or "fails" where our numbers decide, "not shown" where they do not, and "not testable here" where
no outcome of so small an experiment could decide. A claim of runs that several recipes share stands once, with links to
all of them. [The summary](summary.md) has the main claims. A 95 % t-interval over seeds decides, or, where there is
none, the exact two-sided sign test of the seeds whose order is known, at 5 %: six of six are enough, five of five are
not. "Did not learn" means: not within the given number of steps, at its best learning rate. That is the best of a grid
that is the same for all variants, chosen by separate runs. Where all arms share one learning rate, the verdict is
marked "at the same learning rate": another rate may suit the other variant better. Where every model has several
rates, each claim names its rate. Each interval is a 95 % interval by itself: one in twenty true nulls is expected to
show a difference. Every preset but *paper* is smaller than the setting of the paper, so only the direction of a claim
can hold or fail.
"""

_OWN = """## Our own questions

Questions that the paper does not ask, answered by the same runs or by others.
"""

_SUMMARY_HEAD = """# Summary

The main claims about KV shift, and our verdict on each. This page is made from the same records as the
[results](results.md), which have every claim, setting and figure. Models here have at most a few million parameters, so
a verdict is about the direction of an effect at that size. Intervals are 95 %, over seeds.

On text, models with KV shift have a lower loss at 2, 4 and 8 layers in every pair of runs of `decide`, by more than
the margin that was written down before. At the end and at these rates, the gain is on pairs of tokens that were seen
before: every model with the shift begins to copy from its context within the training, and none without it does.
Where plain attention has learnt to copy before, a gain remains (`both_copy`: two and four layers, 6 million tokens).
With two layers, scaling the heads alone gains a fifth of it. With four, where both copy alike, the gain is smaller, and
scaling the heads is not shown to gain any of it.
"""

_SUMMARY_WORDS: dict[Direction, str] = {
    "holds": "shown",
    "fails": "contradicted",
    "not shown": "not shown",
    "not testable here": "not testable here",
}


@dataclass(frozen=True, kw_only=True)
class PresetClaims:
    """The claims of one preset of a recipe, and how they were tested.

    Attributes:
        recipe, preset: names of the recipe and of its preset.
        seeds: number of seeds, without those of the learning-rate search.
        rates: how learning rates were chosen; see `rates_of`.
        claims: the claims, with their verdicts.
    """

    recipe: str
    preset: str
    seeds: str
    rates: str
    claims: Sequence[Claim]

    @property
    def link(self) -> str:
        """A link from a page in docs/ to the section of the recipe's page."""
        return f"[{self.recipe}](../results/{self.recipe}/page.md#{self.preset})"


@dataclass(frozen=True)
class CompletePreset:
    """One preset of a recipe for which the records of all runs exist, including those of the learning-rate search."""

    recipe: Recipe
    preset: str
    records: Sequence[Record]

    @cached_property
    def claims(self) -> PresetClaims:
        """The recipe's claims, evaluated on the records outside the search."""
        shown = without_tuning_runs(self.records)
        return PresetClaims(
            recipe=self.recipe.name,
            preset=self.preset,
            seeds=str(len({record.seed for record in shown})),
            rates=rates_of(self.records),
            claims=self.recipe.claims(shown),
        )


def complete_presets(results: Path) -> list[CompletePreset]:
    """Return all presets whose runs are complete, in the order of the catalogue.

    Args:
        results: folder with STUDY/PRESET.jsonl.
    """
    found = []
    for recipe in map(find_recipe, CATALOGUE):
        for preset in recipe.presets:
            records = load_records(results, recipe, preset)
            if records is not None:
                found.append(CompletePreset(recipe, preset, records))
    return found


def archived_claims(results: Path) -> list[PresetClaims]:
    """Return the claims of the recipes that are archived, from `results/RECIPE/archived.json`."""
    found = []
    for path in sorted(results.glob("*/archived.json")):
        for preset, values in json.loads(path.read_text(encoding="utf-8"))["presets"].items():
            claims = [Claim(**claim) for claim in values.pop("claims")]
            found.append(PresetClaims(recipe=path.parent.name, preset=preset, claims=claims, **values))
    return found


def results_page(found: Sequence[PresetClaims]) -> str:
    """Return the text of `docs/results.md`."""
    head = ("claim", "verdict", "ours", "paper", "recipe", "preset", "seeds", "learning rate")
    claimed: list[tuple[str, ...]] = [head]
    asked: list[tuple[str, ...]] = [("question", *head[1:])]
    listed: dict[tuple[str, str, str], tuple[list[tuple[str, ...]], int]] = {}  # each claim's table and row
    for each in found:
        for claim in each.claims:
            key = (claim.statement, claim.ours, each.preset)
            if key in listed:  # recipes that share runs have the same claim; the first row keeps the paper's words
                table, at = listed[key]
                row = table[at]
                table[at] = (*row[:4], f"{row[4]}, {each.link}", *row[5:])
                continue
            numbers = (claim.ours, claim.paper, each.link, each.preset, each.seeds, each.rates)
            table = asked if claim.own else claimed
            listed[key] = (table, len(table))
            table.append((claim.statement, verdict_text(claim, each.rates), *numbers))
    parts = [_HEAD, as_markdown(claimed, left=None), ""]
    if len(asked) > 1:
        parts += [_OWN, as_markdown(asked, left=None), ""]
    if missing := [name for name in CATALOGUE if name not in {each.recipe for each in found}]:
        parts.append(f"## Not run yet\n\nOf {', '.join(missing)} no preset has been run to its end.\n")
    return "\n".join(parts)


def recipe_pages(found: Sequence[CompletePreset]) -> dict[str, str]:
    """Return the text of each recipe's `page.md` by recipe name: all of its presets, with links to their records."""
    pages: dict[str, str] = {}
    for each in found:
        name, runs = each.recipe.name, each.recipe.entry.runs
        records = f"{each.preset}.jsonl" if runs == name else f"../{runs}/{each.preset}.jsonl"
        shown = section(each.recipe, each.preset, each.records, each.claims.claims, f"{each.preset}.svg")
        text = f"## {each.preset}\n\n{shown}\nRecords: [{records}]({records}).\n"
        pages[name] = f"{pages[name]}\n{text}" if name in pages else f"# {name}: {each.recipe.title}\n\n{text}"
    return pages


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


with Path(__file__).with_name("summary.csv").open(encoding="utf-8", newline="") as _file:
    SUMMARY_ROWS = [SummaryRow(**row) for row in csv.DictReader(_file)]
"""Rows in the order of the page; a row is omitted if its recipe has not been run."""


def summary_page(found: Sequence[PresetClaims]) -> str:
    """Return the text of `docs/summary.md`, the main claims; summary.csv selects and words them.

    Raises:
        LabError: a recipe that has been run does not have exactly one claim that begins with a row's `statement`.
    """
    rows: list[tuple[str, ...]] = [("claim", "ours", "verdict", "seeds", "recipe")]
    complete = {(each.recipe, each.preset): each for each in found}
    for row in SUMMARY_ROWS:
        each = complete.get((row.recipe, row.preset))
        if each is None:
            continue
        ours = [claim for claim in each.claims if claim.statement.startswith(row.statement)]
        if len(ours) != 1:
            raise LabError(f"{row.recipe} {row.preset} must have one claim {row.statement!r} ..., got {len(ours)}")
        verdict = f"**{_SUMMARY_WORDS[ours[0].direction]}**"
        rows.append((row.words, ours[0].ours, verdict, each.seeds, each.link))
    return f"{_SUMMARY_HEAD}\n{as_markdown(rows, left=None)}\n"


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages and return the exit code."""
    results, docs = Path("results"), Path("docs")
    if list(arguments) not in ([], ["--check"]):
        print(
            f"usage: python -m kvshift_lab.recipes.results_pages [--check], got {' '.join(arguments)}", file=sys.stderr
        )
        return 2
    found = complete_presets(results)
    pages = {results / name / "page.md": text for name, text in recipe_pages(found).items()}
    claims = [*(each.claims for each in found), *archived_claims(results)]
    pages |= {docs / "results.md": results_page(claims), docs / "summary.md": summary_page(claims)}
    if not arguments:
        for path, text in pages.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, text.encode())
        for each in found:
            figure = each.recipe.plot(without_tuning_runs(each.records))
            save_figure(figure, results / each.recipe.name / each.preset, kinds=["svg"])
        if runs := sorted((results / "compare").glob("seed-*/*/result.json"), reverse=True):
            curves = plot_curves([run.parent for run in runs])
            (docs / "figures").mkdir(exist_ok=True)
            save_figure(curves, docs / "figures" / "compare", kinds=["svg"])
        return 0
    stale = [path for path, text in pages.items() if not (path.exists() and path.read_text() == text)]
    for path in stale:
        print(f"{path} does not match {results}: run `make results` and commit the changes", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
