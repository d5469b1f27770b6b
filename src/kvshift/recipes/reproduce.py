"""`kvshift reproduce`: the paper's figures and tables, run again.

OUT/RECIPE/PRESET/LABEL/seed-S/    a folder for each job; finished ones are kept, killed ones resume
OUT/RECIPE/PRESET/records.jsonl    what is kept of them, one line each; figure and report are drawn from it
OUT/RECIPE/PRESET/RECIPE.png, .svg, report.md
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from kvshift.lab.analysis.curves import save_figure
from kvshift.lab.errors import LabError
from kvshift.lab.messages import say
from kvshift.lab.runs.folder import RunFailedError, RunFolder, write_bytes
from kvshift.recipes.catalogue import CATALOGUE, find_recipe
from kvshift.recipes.claims import Claim
from kvshift.recipes.page import SMOKE, report
from kvshift.recipes.recipe import Job, Recipe, Record, reported
from kvshift.recipes.records import read_records, record_of, write_records
from kvshift.recipes.reproduce_config import ReproduceConfig
from kvshift.recipes.sweep import sweep
from kvshift.recipes.tuning import at_best_rates, best_rates, tuning_jobs
from kvshift.recipes.watching import watching

__all__ = ["ReproduceConfig", "folder_of", "reproduce"]


def reproduce(config: ReproduceConfig) -> None:
    """Run what is missing of a recipe, draw it, and print our numbers beside the paper's.

    Raises:
        LabError: options or folders are not fit.
        RunFailedError: at least one run failed; the others are kept.
        InterruptedRunError: a signal came.
    """
    config.check()
    if config.recipe is None:
        raise LabError(f"recipe must be one of {', '.join(CATALOGUE)}, got None")
    recipe = find_recipe(config.recipe)
    if config.preset not in recipe.presets:
        raise LabError(f"preset must be one of {', '.join(recipe.presets)}, got {config.preset!r}")
    preset = recipe.presets[config.preset]
    seeds = range(config.seeds or preset.seeds)
    folder = config.out / recipe.name / config.preset
    jobs = recipe.jobs(config.preset, seeds)
    tuning = [] if preset.grid is None else tuning_jobs(recipe.jobs(config.preset, preset.grid.seeds), preset.grid)
    _refuse_to_forget(config, [*tuning, *jobs])
    with RunFolder(folder).locked():
        say(f"{recipe.name}, {config.preset}: {recipe.title} ({recipe.source}); {preset.cost}")
        records = _run(tuning, folder, config, kept=[])
        if tuning:
            best = best_rates(records, recipe.tuned_by)
            for arm, rate in best.items():
                say(f"{arm}: learning rate {rate:.2g} is the best of the grid")
            jobs = at_best_rates(jobs, best)
        records = _run(jobs, folder, config, kept=records)
        _show(recipe, config, folder, records)


def kept_at(config: ReproduceConfig) -> Path:
    """Where the records are kept besides, if anywhere."""
    assert config.results is not None
    assert config.recipe is not None
    return config.results / config.recipe / f"{config.preset}.jsonl"


def _refuse_to_forget(config: ReproduceConfig, jobs: Sequence[Job]) -> None:
    """Records that are kept are replaced by those of the same jobs and more, never by fewer."""
    if config.results is None or not kept_at(config).exists():
        return
    asked = {(job.label, job.seed) for job in jobs}
    lost = [record for record in read_records(kept_at(config)) if (record.label, record.seed) not in asked]
    if lost:
        raise LabError(
            f"results: {kept_at(config)} keeps {len(lost)} runs that this call does not make ({lost[0].label}, seed "
            f"{lost[0].seed} ...); ask for at least as many seeds, or take that file away"
        )


def folder_of(folder: Path, job: Job) -> Path:
    """Where a job of a preset does its work."""
    label = re.sub(r"[^a-z0-9.]+", "-", job.label.lower()).strip("-")
    return folder / label / f"seed-{job.seed}"


def _run(jobs: Sequence[Job], folder: Path, config: ReproduceConfig, *, kept: Sequence[Record]) -> list[Record]:
    """Run what is missing of `jobs`; returns the records `kept` from before and those of all jobs, written down.

    Raises:
        RunFailedError: at least one failed; the others are kept.
    """
    places = [(job, folder_of(folder, job)) for job in jobs]
    missing = [(job, out) for job, out in places if not job.is_finished(out)]
    if len(missing) < len(jobs):
        say(f"{len(jobs) - len(missing)} of {len(jobs)} runs were finished before")
    problems = []
    if missing:
        with watching(missing) as ended:
            start = time.monotonic()

            def done(number: int, problem: str | None) -> None:
                ended.add(number)
                job = missing[number][0]
                what = "finished" if problem is None else f"FAILED: {problem}"
                place = f"[{len(ended)} of {len(missing)}, {time.monotonic() - start:.0f} s]"
                tqdm.write(f"{place} {job.label}, seed {job.seed}: {what}", file=sys.stderr)

            problems = sweep(missing, workers=config.jobs, cluster=config.cluster, done=done)
    records = [*kept, *(record_of(job, out) for job, out in places if job.is_finished(out))]
    write_records(folder / "records.jsonl", records)
    if problems:
        listed = "\n  ".join(problems)
        raise RunFailedError(
            f"{len(problems)} of {len(jobs)} runs failed; the same command tries them again:\n  {listed}"
        )
    return records


def _show(recipe: Recipe, config: ReproduceConfig, folder: Path, records: Sequence[Record]) -> None:
    shown = reported(records)
    claims = recipe.claims(shown)
    images = save_figure(recipe.plot(shown), folder / recipe.name)
    page = folder / "report.md"
    write_bytes(page, report(recipe, config.preset, records, claims, figure=f"{recipe.name}.svg").encode())
    if config.results is not None:
        write_records(kept_at(config), records)
    print(f"\n{_text(claims)}\n")
    if config.preset == "smoke":
        print(f"{SMOKE}.\n")
    written = [("report", page), ("records", folder / "records.jsonl"), *(("figure", image) for image in images)]
    for what, path in written:
        print(f"{what:<8} {path.resolve()}")


def _text(claims: Sequence[Claim]) -> str:
    parts = []
    for claim in claims:
        rows = [("paper:", claim.paper), ("ours:", claim.ours), ("size:", claim.size)]
        detail = "\n".join(f"    {name:<7}{text}" for name, text in rows)
        parts.append(f"{claim.direction.upper():<9} {claim.statement}\n{detail}")
    return "\n".join(parts)
