"""The report of one preset of a recipe, in Markdown, made only from its records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvshift_lab.analysis.learning import steps_to_level
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.data.config import DataConfig
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.recipe import Job, Recipe, Record, Score, curves_by_label, has_diverged, without_tuning_runs
from kvshift_lab.study.tuning import best_rates, by_tuned_arm

SMOKE = "The preset smoke only shows that everything runs: its verdicts mean nothing"

LEVELS = (0.9, 0.99)

_ONE, _ONE_EACH, _ALL_EACH = "one for all", "one for each size", "several for each"


def report(recipe: Recipe, preset: str, records: Sequence[Record], claims: Sequence[Claim], *, figure: str) -> str:
    """Return the page of one preset of a recipe."""
    text = text_read(records, recipe.jobs(preset, [0]))
    return f"# {heading(recipe, preset)}\n\n{text}{section(recipe, preset, records, claims, figure)}"


def text_read(records: Sequence[Record], jobs: Sequence[Job]) -> str:
    """Return a paragraph that names the text that the runs have read; "" if they have read none.

    Args:
        records: records of the runs.
        jobs: the jobs of the recipe, on the text that its notes describe.
    """
    times: dict[str, float] = {}
    for record in records:
        data, task = record.options.get("data") or {}, record.options.get("task") or {}
        if corpus := data.get("corpus") or task.get("corpus"):
            times[corpus] = max(times.get(corpus, 0), _times_read(record))
    if not times:
        return ""
    listed = "; ".join(_text_name(name) + f" (up to {often:.2g} times)" * (often > 0) for name, often in times.items())
    text = f"The runs have read {listed}."
    described = {name for job in jobs for name in getattr(job, "text_files", tuple)()}
    if described and not described & set(times):
        text = f"**{text} The notes describe other text: {', '.join(map(_text_name, sorted(described)))}.**"
    return text + "\n\n"


def _text_name(corpus: str) -> str:
    return "Tiny Shakespeare, the bundled text of 1.1 MB" if corpus == DataConfig().corpus else f"`{corpus}`"


def _times_read(record: Record) -> float:
    """Return how often a run reads its training text; 0 if the record does not have the size of the text."""
    rows, tokens = (record.options.get("data_facts") or {}).get("train_rows"), record.options.get("tokens_per_step")
    if not rows or not tokens:
        return 0
    return record.options["steps"] * tokens / (rows * record.options["data"]["sequence_length"])


def heading(recipe: Recipe, preset: str) -> str:
    """Return the heading of the report, and of its section on a page."""
    return f"{recipe.name}, {preset}: {recipe.title}"


def verdict_text(claim: Claim, rates: str) -> str:
    """Return the verdict in bold. It states if the decision involved no runs, or one learning rate for all variants."""
    at_one = claim.direction in ("holds", "fails") and rates in (_ONE, _ONE_EACH)
    return f"**{claim.direction}**{f' by {claim.by}' if claim.by else ' at the same learning rate' if at_one else ''}"


def section(recipe: Recipe, preset: str, records: Sequence[Record], claims: Sequence[Claim], figure: str) -> str:
    """Return the report below its heading; `figure` is the address of the picture."""
    parts = [f"{recipe.source}.", f"![{recipe.title}]({figure})"]
    own, of_paper = ([claim for claim in claims if claim.own is which] for which in (True, False))
    for asked, title in ((of_paper, None), (own, "Our own questions:" if of_paper else None)):
        if asked:
            rows = [("claim", "paper", "ours", "note", "verdict")]
            rows += [(c.statement, c.paper, c.ours, c.note, verdict_text(c, rates_of(records))) for c in asked]
            parts += [title] if title else []
            parts.append(as_markdown(rows, left=None))
    if preset == "smoke":
        parts.insert(1, f"**{SMOKE}.**")
    shown = without_tuning_runs(records)
    if recipe.scored is not None:
        parts.append(_learning(shown, recipe.scored))
    if setting := _setting(shown):
        parts.append(f"What was run: {setting}.")
    if len(shown) < len(records):
        parts.append(_rates([record for record in records if record.tuning_for is not None], recipe.tuned_by))
    if recipe.tables is not None:
        parts.append(recipe.tables(records))
    if recipe.notes:
        parts.append("Notes (sizes are those of the preset `paper` unless another is named):")
        parts.append("\n".join(f"- {note}" for note in recipe.notes))
    parts.append(_provenance(records))
    return "\n\n".join(parts) + "\n"


def _learning(records: Sequence[Record], name: str) -> str:
    """Return a table of the steps of each model to 90 % and 99 %, with intervals over seeds."""
    rows = [("model", *(f"steps to {100 * level:g} %" for level in LEVELS))]
    for label, curves in curves_by_label(records, name).items():
        rows.append((label, *(steps_to_level(curves, level).text for level in LEVELS)))
    return as_markdown(rows, left=None)


def rates_of(records: Sequence[Record]) -> str:
    """Describe the choice of learning rates for the variants of a preset, for the overview."""
    chose = [record for record in records if record.tuning_for is not None]
    if chose:
        grid = {rate for by_rate in by_tuned_arm(chose).values() for rate in by_rate}
        return f"best of {len(grid)} rates per arm"
    by_model: dict[str, set[float]] = {}
    for record in records:
        if "optimizer" in record.options:
            model = json.dumps(record.options["model"], sort_keys=True)
            by_model.setdefault(model, set()).add(record.options["optimizer"]["learning_rate"])
    rates = set().union(*by_model.values())
    if len(rates) < 2:
        return _ONE if rates else "-"
    return _ALL_EACH if all(of_model == rates for of_model in by_model.values()) else _ONE_EACH


def _rates(records: Sequence[Record], score: Score) -> str:
    """Return a table of the last losses of each variant at each learning rate, with the chosen rates in bold."""
    variants, best = by_tuned_arm(records), best_rates(records, score)
    rates = sorted({rate for by_rate in variants.values() for rate in by_rate})
    rows = [("learning rate", *(f"{rate:.2g}" for rate in rates))]
    for variant, by_rate in variants.items():
        cells = []
        for rate in rates:
            losses = ", ".join(_last_loss(record) for record in by_rate.get(rate, []))
            cells.append(f"**{losses}**" if rate == best[variant] else losses)
        rows.append((str(variant), *cells))
    steps = " or ".join(f"{number:,}" for number in sorted({record.options["steps"] for record in records}))
    seeds = ", ".join(str(seed) for seed in sorted({record.seed for record in records}))
    ends = [f"{variant} ({best[variant]:.2g})" for variant in variants if best[variant] in (rates[0], rates[-1])]
    beyond = f"\n\nAt an end of the grid, so a better rate may lie beyond it: {'; '.join(ends)}." if ends else ""
    return (
        f"Each variant has its best learning rate of one grid, by {score.description}, from separate tuning runs "
        f"({steps} steps, seeds {seeds}) that enter nothing else on this page. Their last validation losses:\n\n"
        f"{as_markdown(rows)}{beyond}"
    )


def _last_loss(record: Record) -> str:
    return "diverged" if has_diverged(record) else f"{record.curve['loss'][-1]:.4g}"


def _setting(records: Sequence[Record]) -> str:
    """Describe the task, models and steps of training runs in one line, with each distinct value once."""
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
    """Describe the origin of the numbers in one line: runs, hardware, program, dates, CPU time."""
    machines = Counter(_machine(record) for record in records)
    hardware = [f"{name} ({count})" if len(machines) > 1 else name for name, count in sorted(machines.items())]
    commits = sorted({_short(str(record.environment.get("commit"))) for record in records})
    days = sorted({str(record.environment.get("started"))[:10] for record in records})
    times = [record.result.get("processor_seconds") for record in records]
    known = [seconds for seconds in times if seconds is not None]
    spent = f"; {sum(known) / 60:.0f} minutes of CPU time" if known and len(known) == len(times) else ""
    return (
        f"{len(records)} runs on {', '.join(hardware)}, commit {', '.join(commits)}, "
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}{spent}."
    )


def _short(commit: str) -> str:
    """Return the first eight digits, and "+" if tracked files differed from the commit."""
    return commit[:8] + "+" * commit.endswith("+")


def _machine(record: Record) -> str:
    hardware = record.environment["hardware"]
    return hardware["cpu"] if hardware["device"] == "cpu" else hardware["device"]
