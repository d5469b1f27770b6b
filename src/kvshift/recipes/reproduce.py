"""`kvshift reproduce`: the paper's figures and tables, run again.

OUT/RECIPE/PRESET/LABEL/seed-S/    a folder for each job; finished ones are kept, killed ones resume
OUT/RECIPE/PRESET/records.jsonl    what is kept of them, one line each; figure and report are drawn from it
OUT/RECIPE/PRESET/RECIPE.png, .svg, report.md
OUT/STUDY/PRESET/LABEL/seed-S/     in place of the first, of recipes that share the runs of a study

With RESULTS, each record is also kept there as soon as its run has ended, and a run whose record is there is not run
again.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from kvshift.lab.analysis.curves import save_figure
from kvshift.lab.core.atomic import write_bytes
from kvshift.lab.core.errors import LabError, RunFailedError
from kvshift.lab.core.messages import say
from kvshift.lab.data.config import SHARED
from kvshift.lab.runs.folder import RunFolder
from kvshift.lab.runs.run import is_finished
from kvshift.lab.study.claims import Claim
from kvshift.lab.study.jobs import on_text_at_hand
from kvshift.lab.study.recipe import Job, Recipe, Record, reported
from kvshift.lab.study.records import KeptRecords, record_of, write_records
from kvshift.lab.study.sweep import sweep
from kvshift.lab.study.tuning import at_best_rates, best_rates, tuning_jobs
from kvshift.lab.study.watching import watching
from kvshift.recipes.catalogue import CATALOGUE, find_recipe
from kvshift.recipes.page import SMOKE, report
from kvshift.recipes.reproduce_config import ReproduceConfig


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
    runs = config.out / recipe.entry.runs / config.preset
    asked = recipe.jobs(config.preset, seeds)
    jobs = on_text_at_hand(asked)
    tuning = []
    if preset.grid is not None:
        tuning = tuning_jobs(on_text_at_hand(recipe.jobs(config.preset, preset.grid.seeds)), preset.grid)
    store = None if config.results is None else _store(config.results, recipe, config.preset)
    if store is not None:
        store.refuse_to_forget([*tuning, *jobs])
    say(f"{recipe.name}, {config.preset}: {recipe.title} ({recipe.source}); {preset.cost}")
    if jobs != asked:
        say(f"{SHARED} names no folder of text: the bundled corpus, far smaller, stands for it and is read repeatedly")
    records: list[Record] = []
    if tuning:
        records = _run(tuning, runs, folder, config, store, earlier=[])
        best = best_rates(records, recipe.tuned_by)
        for variant, rate in best.items():
            say(f"{variant}: learning rate {rate:.2g} is the best of the grid")
        jobs = at_best_rates(jobs, best)
    records = _run(jobs, runs, folder, config, store, earlier=records)
    with RunFolder(folder).locked():
        write_records(folder / "records.jsonl", records)
        _show(recipe, config, folder, store, records)


def _store(results: Path, recipe: Recipe, preset: str) -> KeptRecords:
    return KeptRecords(results, recipe.entry.runs, preset, shared=recipe.entry.study is not None)


def folder_of(folder: Path, job: Job) -> Path:
    """Where a job of a preset does its work."""
    label = re.sub(r"[^a-z0-9.]+", "-", job.label.lower()).strip("-")
    return folder / label / f"seed-{job.seed}"


def _run(
    jobs: Sequence[Job],
    runs: Path,
    folder: Path,
    config: ReproduceConfig,
    store: KeptRecords | None,
    *,
    earlier: Sequence[Record],
) -> list[Record]:
    """Run what is missing of `jobs`; returns the `earlier` records and those of all jobs, written down.

    Args:
        jobs: of one kind, tuning or reported.
        runs: folder of the folders of all runs; recipes of one study share it.
        folder: of the recipe.
        config: of the call.
        store: where records are kept besides.
        earlier: records of this recipe.

    Raises:
        RunFailedError: at least one failed; the others are kept.
    """
    places = [(job, folder_of(runs, job)) for job in jobs]
    found = _find(places, runs, store)
    if len(found) == len(places):
        return [*earlier, *found.values()]
    with RunFolder(runs).locked():
        left = [place for number, place in enumerate(places) if number not in found]
        work, problems = [(job, out) for job, out in left if not job.is_finished(out)], []
        if work:
            with watching(work) as ended:
                start = time.monotonic()

                def done(number: int, problem: str | None) -> None:
                    ended.add(number)
                    job, out = work[number]
                    what = "finished" if problem is None else f"FAILED: {problem}"
                    place = f"[{len(ended)} of {len(work)}, {time.monotonic() - start:.0f} s]"
                    tqdm.write(f"{place} {job.label}, seed {job.seed}: {what}", file=sys.stderr)
                    if store is not None and problem is None:
                        store.add([record_of(job, out)])

                problems = sweep(work, workers=config.jobs, cluster=config.cluster, done=done)
        for number, (job, out) in enumerate(places):
            if number not in found and job.is_finished(out):
                found[number] = record_of(job, out)
        records = [*earlier, *(record for _, record in sorted(found.items()))]
        write_records(folder / "records.jsonl", records)
    if problems:
        listed = "\n  ".join(problems)
        raise RunFailedError(
            f"{len(problems)} of {len(jobs)} runs failed; the same command tries them again:\n  {listed}"
        )
    return records


def _find(places: Sequence[tuple[Job, Path]], folder: Path, store: KeptRecords | None) -> dict[int, Record]:
    """The records of the jobs that are finished, in their folders or in the store, by number; the store gets all.

    Another process may be at work in the folders: those of unfinished runs are not touched.
    """
    found: dict[int, Record] = {}
    counts: dict[Path, int] = {}
    for number, (job, out) in enumerate(places):
        kept = None if store is None else store.find(job)
        record, path = _record_in(job, out), folder
        if record is None and kept is not None:
            record, path = kept
        if record is not None:
            found[number] = record
            counts[path] = counts.get(path, 0) + 1
    if found:
        where = ", ".join(f"{count} in {path}" for path, count in counts.items())
        say(f"{len(found)} of {len(places)} runs were finished before: {where}")
        if store is not None:
            store.add([*found.values()])
    return found


def _record_in(job: Job, out: Path) -> Record | None:
    """The record of a finished job; a LabError where it had other options."""
    if not is_finished(out):
        return None
    try:
        record = record_of(job, out)
    except LabError:  # training has ended, and what comes after it has not
        return None
    return record if job.is_finished(out) else None


def _show(
    recipe: Recipe, config: ReproduceConfig, folder: Path, store: KeptRecords | None, records: Sequence[Record]
) -> None:
    shown = reported(records)
    claims = recipe.claims(shown)
    images = save_figure(recipe.plot(shown), folder / recipe.name)
    page = folder / "report.md"
    write_bytes(page, report(recipe, config.preset, records, claims, figure=f"{recipe.name}.svg").encode())
    if store is not None:
        store.complete(records)
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
