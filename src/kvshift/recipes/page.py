"""From kept records to Markdown: the report of one preset, a page for each recipe, and `docs/results.md` over all.

    python -m kvshift.recipes.page [--check]

writes, from `results/` in the working directory, `results/RECIPE/page.md` and `results/RECIPE/PRESET.svg`,
`docs/results.md`, `docs/summary.md`, and the figure of the README's comparison; with --check it writes nothing and
fails where a page is not what the records give.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshift.lab.analysis.curves import plot_curves, save_figure
from kvshift.lab.analysis.learning import reach_of
from kvshift.lab.analysis.tables import as_markdown
from kvshift.lab.core.atomic import write_bytes
from kvshift.lab.study.claims import Claim
from kvshift.lab.study.recipe import Recipe, Record, Score, accuracy_curves, by_label, diverged, reported
from kvshift.lab.study.records import kept_records
from kvshift.lab.study.tuning import best_rates, by_variant
from kvshift.recipes.catalogue import CATALOGUE, find_recipe
from kvshift.recipes.summary import summary_page

SMOKE = "The preset smoke only shows that everything runs: its verdicts mean nothing"

LEVELS = (0.9, 0.99)

_ONE, _ONE_EACH, _ALL_EACH = "one for all", "one for each size", "several for each"

_HEAD = """# Results

The paper's claims beside what we measured. This page is made from `results/` by `make results`; nothing in it is
written by hand. `kvshift reproduce RECIPE --preset PRESET` runs any of it again.

The verdict is "holds" or "fails" where our numbers decide, "not shown" where they do not, and "not testable here" where
no outcome of so small an experiment could decide. A claim of runs that several recipes share stands once, with links to
all of them. [The summary](summary.md) has the main claims on one screen. A 95 % t-interval over
seeds decides, or, where there is none, the exact sign test at 5 %: five of five seeds are enough, three of three are
not. "Did not learn" means: not within the given number of steps, at its best learning rate. That is the best of a grid
that is the same for all variants, chosen by separate runs. Where all arms share one learning rate, the verdict is
marked "at one rate": another rate may suit the other variant better. Where every model has several rates, each claim
names its rate. Each interval is a 95 % interval by itself: one in twenty true nulls is expected to show a difference.
Every preset but *paper* is smaller than the setting of the paper, so only the direction of a claim can hold or fail.
"""

_OWN = """## Questions of ours

What the paper does not claim, asked of the same runs or of others.
"""


def report(recipe: Recipe, preset: str, records: Sequence[Record], claims: Sequence[Claim], *, figure: str) -> str:
    """The page of one preset of one recipe."""
    return f"# {_heading(recipe, preset)}\n\n{_section(recipe, preset, records, claims, figure)}"


@dataclass(frozen=True)
class Published:
    """One preset of a recipe, all of whose runs are kept.

    Attributes:
        records: of all runs, those that chose a learning rate too.
        claims: what the others show.
    """

    recipe: Recipe
    preset: str
    records: Sequence[Record]
    claims: Sequence[Claim]

    def section(self, figure: str) -> str:
        """What a page says of it, below its heading."""
        return _section(self.recipe, self.preset, self.records, self.claims, figure)


def published(results: Path) -> list[Published]:
    """All presets that have been run to their end, in the order of the catalogue.

    Args:
        results: folder with STUDY/PRESET.jsonl.
    """
    found = []
    for recipe in map(find_recipe, CATALOGUE):
        for preset in recipe.presets:
            records = kept_records(results, recipe, preset)
            if records is not None:
                found.append(Published(recipe, preset, records, recipe.claims(reported(records))))
    return found


def results_page(found: Sequence[Published]) -> str:
    """The text of `docs/results.md`."""
    head = ("paper", "ours", "preset", "seeds", "learning rate", "verdict")
    claimed: list[tuple[str, ...]] = [("recipe", "claim", *head)]
    asked: list[tuple[str, ...]] = [("recipe", "question", *head)]
    listed: dict[tuple[str, str, str], tuple[list[tuple[str, ...]], int]] = {}  # where each claim stands
    sections: list[str] = []
    for each in found:
        recipe, preset = each.recipe, each.preset
        seeds, rates = str(len({record.seed for record in reported(each.records)})), _rates_of(each.records)
        link = f"[{recipe.name}](#{_anchor(recipe, preset)})"
        for claim in each.claims:
            key = (claim.statement, claim.ours, preset)
            if key in listed:  # of runs that recipes share; the first row says what the paper has
                table, at = listed[key]
                table[at] = (f"{table[at][0]}, {link}", *table[at][1:])
                continue
            row = (link, claim.statement, claim.paper, claim.ours, preset, seeds, rates, _verdict(claim, rates))
            table = asked if claim.own else claimed
            listed[key] = (table, len(table))
            table.append(row)
        section = each.section(f"../results/{recipe.name}/{preset}.svg")
        sections.append(f"## {_heading(recipe, preset)}\n\n{section}")
    parts = [_HEAD, as_markdown(claimed, left=None), ""]
    if len(asked) > 1:
        parts += [_OWN, as_markdown(asked, left=None), ""]
    run = {each.recipe.name for each in found}
    if missing := [name for name in CATALOGUE if name not in run]:
        sections.append(f"## Not run yet\n\nOf {', '.join(missing)} no preset has been run to its end.\n")
    return "\n".join([*parts, *sections])


def recipe_pages(found: Sequence[Published]) -> dict[str, str]:
    """By the name of a recipe, the text of its `page.md`: all of its presets, with links to their records."""
    pages: dict[str, str] = {}
    for each in found:
        name, runs = each.recipe.name, each.recipe.entry.runs
        records = f"{each.preset}.jsonl" if runs == name else f"../{runs}/{each.preset}.jsonl"
        text = f"## {each.preset}\n\n{each.section(f'{each.preset}.svg')}\nRecords: [{records}]({records}).\n"
        pages[name] = f"{pages[name]}\n{text}" if name in pages else f"# {name}: {each.recipe.title}\n\n{text}"
    return pages


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages; returns the exit code."""
    results, docs = Path("results"), Path("docs")
    if list(arguments) not in ([], ["--check"]):
        print(f"usage: python -m kvshift.recipes.page [--check], got {' '.join(arguments)}", file=sys.stderr)
        return 2
    found = published(results)
    pages = {results / name / "page.md": text for name, text in recipe_pages(found).items()}
    pages |= {docs / "results.md": results_page(found), docs / "summary.md": summary_page(results, _anchor)}
    if not arguments:
        for path, text in pages.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, text.encode())
        for each in found:
            figure = each.recipe.plot(reported(each.records))
            save_figure(figure, results / each.recipe.name / each.preset, kinds=["svg"])
        if runs := sorted((results / "compare").glob("seed-*/*/result.json"), reverse=True):
            curves = plot_curves([run.parent for run in runs])
            (docs / "figures").mkdir(exist_ok=True)
            save_figure(curves, docs / "figures" / "compare", kinds=["svg"])
        return 0
    stale = [path for path, text in pages.items() if not (path.exists() and path.read_text() == text)]
    for path in stale:
        print(f"{path} is not what {results} gives: run `make results` and commit what it changes", file=sys.stderr)
    return int(bool(stale))


def _verdict(claim: Claim, rates: str) -> str:
    """In bold; what was decided without runs, or without giving each variant its own learning rate, says so."""
    at_one = claim.direction in ("holds", "fails") and rates in (_ONE, _ONE_EACH)
    return f"**{claim.direction}**{f' by {claim.by}' if claim.by else ' at one rate' if at_one else ''}"


def _heading(recipe: Recipe, preset: str) -> str:
    return f"{recipe.name}, {preset}: {recipe.title}"


def _anchor(recipe: Recipe, preset: str) -> str:
    """As GitHub makes it: lower case, without signs, with - for each space."""
    kept = "".join(sign for sign in _heading(recipe, preset).lower() if sign.isalnum() or sign in " -_")
    return kept.replace(" ", "-")


def _section(recipe: Recipe, preset: str, records: Sequence[Record], claims: Sequence[Claim], figure: str) -> str:
    parts = [f"{recipe.source}.", f"![{recipe.title}]({figure})"]
    own, of_paper = ([claim for claim in claims if claim.own is which] for which in (True, False))
    for asked, title in ((of_paper, None), (own, "Questions of ours:" if of_paper else None)):
        if asked:
            rows = [("claim", "paper", "ours", "size", "verdict")]
            rows += [(c.statement, c.paper, c.ours, c.size, _verdict(c, _rates_of(records))) for c in asked]
            parts += [title] if title else []
            parts.append(as_markdown(rows, left=None))
    if preset == "smoke":
        parts.insert(1, f"**{SMOKE}.**")
    shown = reported(records)
    if recipe.scored is not None:
        parts.append(_learning(shown, recipe.scored))
    if setting := _setting(shown):
        parts.append(f"What was run: {setting}.")
    if len(shown) < len(records):
        parts.append(_rates([record for record in records if record.tunes is not None], recipe.tuned_by))
    if recipe.tables is not None:
        parts.append(recipe.tables(records))
    if recipe.notes:
        parts.append("Notes; what they say of sizes is of the preset `paper`, where they name no other:")
        parts.append("\n".join(f"- {note}" for note in recipe.notes))
    parts.append(_provenance(records))
    return "\n\n".join(parts) + "\n"


def _learning(records: Sequence[Record], name: str) -> str:
    """The steps to 90 % and 99 % of each model, with their intervals over seeds."""
    rows = [("model", *(f"steps to {100 * level:g} %" for level in LEVELS))]
    for label, seeds in by_label(records).items():
        curves = accuracy_curves(seeds, name)
        rows.append((label, *(reach_of(curves, level).text for level in LEVELS)))
    return as_markdown(rows, left=None)


def _rates_of(records: Sequence[Record]) -> str:
    """Which learning rates the variants of a preset had, for the overview."""
    chose = [record for record in records if record.tunes is not None]
    if chose:
        grid = {rate for by_rate in by_variant(chose).values() for rate in by_rate}
        return f"own best of {len(grid)}"
    by_model: dict[str, set[float]] = {}
    for record in records:
        if "optimizer" in record.options:
            model = json.dumps(record.options["model"], sort_keys=True)
            by_model.setdefault(model, set()).add(record.options["optimizer"]["learning_rate"])
    rates = set().union(*by_model.values())
    if len(rates) < 2:
        return _ONE if rates else "-"
    return _ALL_EACH if all(of_model == rates for of_model in by_model.values()) else _ONE_EACH


def _rates(records: Sequence[Record], score: Score | None) -> str:
    """The grid of learning rates: what the runs of each variant reached, in bold where its own rate was chosen."""
    assert score is not None, "a recipe with a grid says by what it is tuned"
    variants, best = by_variant(records), best_rates(records, score)
    rates = sorted({rate for by_rate in variants.values() for rate in by_rate})
    rows = [("learning rate", *(f"{rate:.2g}" for rate in rates))]
    for variant, by_rate in variants.items():
        cells = []
        for rate in rates:
            losses = ", ".join(_last_loss(record) for record in by_rate.get(rate, []))
            cells.append(f"**{losses}**" if rate == best[variant] else losses)
        rows.append((variant, *cells))
    steps = " or ".join(f"{number:,}" for number in sorted({record.options["steps"] for record in records}))
    seeds = ", ".join(str(seed) for seed in sorted({record.seed for record in records}))
    ends = [f"{variant} ({best[variant]:.2g})" for variant in variants if best[variant] in (rates[0], rates[-1])]
    beyond = f"\n\nAt an end of the grid, so that a better one may lie beyond: {'; '.join(ends)}." if ends else ""
    return (
        f"Each variant has the learning rate of one grid that served it best, by {score.says}, in runs "
        f"of their own ({steps} steps, seeds {seeds}), which nothing else here is made of. The last validation loss of "
        f"each:\n\n"
        f"{as_markdown(rows)}{beyond}"
    )


def _last_loss(record: Record) -> str:
    return "diverged" if diverged(record) else f"{record.curve['loss'][-1]:.4g}"


def _setting(records: Sequence[Record]) -> str:
    """The task, models and steps of training runs, in a line; what has one value in all of them once."""
    options = [record.options for record in records if "task" in record.options]
    if not options:
        return ""
    named = {
        "width": [o["model"].get("hidden_size", o["model"].get("width")) for o in options],
        "layers": [o["model"].get("num_hidden_layers", o["model"].get("layers")) for o in options],
        "steps": [o["steps"] for o in options],
        "sequences per step": [o["batch_size"] * o["accumulation"] for o in options],
        "learning rate": [o["optimizer"]["learning_rate"] for o in options],
        **{f"task {name}": [o["task"].get(name) for o in options] for name in options[0]["task"]},
    }
    parts = []
    for name, values in named.items():
        found = sorted({_shown(value) for value in values if value is not None and not isinstance(value, dict)})
        if found:
            parts.append(f"{name} {' or '.join(found)}")
    return ", ".join(parts)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _provenance(records: Sequence[Record]) -> str:
    """Where the numbers come from, in a line: runs, hardware, program, dates, CPU time."""
    hardware = sorted({_machine(record) for record in records})
    commits = sorted({str(record.environment.get("commit"))[:8] for record in records})
    days = sorted({str(record.environment.get("started"))[:10] for record in records})
    times = [record.result.get("processor_seconds") for record in records]
    known = [seconds for seconds in times if seconds is not None]
    spent = f"; {sum(known) / 60:.0f} minutes of CPU time" if known and len(known) == len(times) else ""
    return (
        f"{len(records)} runs on {', '.join(hardware)}, commit {', '.join(commits)}, "
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}{spent}."
    )


def _machine(record: Record) -> str:
    hardware = record.environment["hardware"]
    return hardware["cpu"] if hardware["device"] == "cpu" else hardware["device"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
