"""Run the missing runs of a study: first the tuning runs, which choose learning rates, then the reported runs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from kvshift_lab.core.errors import FolderInUseError, LabError, RunFailedError
from kvshift_lab.core.messages import log
from kvshift_lab.run.finished import is_finished
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.study.entry import Cluster
from kvshift_lab.study.jobs import on_bundled_text, require_text
from kvshift_lab.study.recipe import Job, Recipe, Record
from kvshift_lab.study.records import RecordStore, record_of, write_records
from kvshift_lab.study.sweep import sweep
from kvshift_lab.study.sweep_progress import report_progress
from kvshift_lab.study.tuning import at_best_rates, best_rates, tuning_jobs


@dataclass(frozen=True, kw_only=True)
class StudyExecution:
    """The folders of the runs of one preset of a recipe, and how the runs execute.

    Attributes:
        runs: folder that contains the folders of all runs; recipes of a study share it.
        folder: folder of the recipe.
        store: folder of results, to which records are also written.
        workers: number of runs at a time; see `sweep`.
        cluster: machines on which the runs execute.
        isolated: whether each run has a new process, one at a time, which shows its progress itself; see `sweep`.
    """

    runs: Path
    folder: Path
    store: RecordStore | None = None
    workers: int | None = None
    cluster: Cluster = "local"
    isolated: bool = False


def run_study(
    recipe: Recipe, preset: str, seeds: Sequence[int], execution: StudyExecution, *, bundled_text: bool = False
) -> list[Record]:
    """Run the missing runs of a preset, and return the records of all runs, which are written to the recipe's folder.

    Args:
        recipe: the recipe.
        preset: one of its presets.
        seeds: seeds of the reported runs.
        execution: folders of the study, and how the runs execute.
        bundled_text: whether runs read the bundled corpus in place of text in files.

    Raises:
        LabError: if folders contain other runs, or a text is missing.
        RunFailedError: if at least one run failed; the others are kept.
        InterruptedRunError: if the process received a signal.
    """
    size = recipe.presets[preset]
    with_text = on_bundled_text if bundled_text else list[Job]
    jobs = with_text(recipe.jobs(preset, seeds))
    tuning = []
    if size.grid is not None:
        tuning = tuning_jobs(with_text(recipe.jobs(preset, size.grid.seeds)), size.grid)
    if execution.store is not None:
        execution.store.require_no_other_runs([*tuning, *jobs])
    log(f"{recipe.name}, {preset}: {recipe.title} ({recipe.source}); {size.cost}")
    records: list[Record] = []
    if tuning:
        records = run_jobs(_places(tuning, execution), execution)
        best = best_rates(records, recipe.tuned_by)
        for variant, rate in best.items():
            log(f"{variant}: learning rate {rate:.2g} is the best of the grid")
        jobs = at_best_rates(jobs, best)
    return run_jobs(_places(jobs, execution), execution, earlier=records)


def job_folder(folder: Path, job: Job) -> Path:
    """Return the folder of a job, below the folder of all runs."""
    name = re.sub(r"[^a-z0-9.]+", "-", job.arm.label.lower()).strip("-")
    return folder / name / f"seed-{job.seed}"


def _places(jobs: Sequence[Job], execution: StudyExecution) -> list[tuple[Job, Path]]:
    return [(job, job_folder(execution.runs, job)) for job in jobs]


def run_jobs(
    jobs: Sequence[tuple[Job, Path]], execution: StudyExecution, *, earlier: Sequence[Record] = ()
) -> list[Record]:
    """Run the unfinished jobs. Return and write the `earlier` records and those of all jobs.

    Args:
        jobs: either tuning or reported runs, with their folders.
        execution: folders of the study, and how the jobs execute.
        earlier: earlier records of this study.

    Raises:
        LabError: if the text of a run is missing.
        RunFailedError: if at least one run failed; the others are kept.
    """
    runs, store = execution.runs, execution.store
    found = _find(jobs, runs, store)
    if len(found) == len(jobs):
        return [*earlier, *found.values()]
    with RunFolder(runs).locked():
        left = [place for number, place in enumerate(jobs) if number not in found]
        for _, out in left:
            _wait_until_free(out)
        work, problems = [(job, out) for job, out in left if not job.is_finished(out)], []
        if work:
            require_text([job for job, _ in work])
            with nullcontext(set[int]()) if execution.isolated else report_progress(work) as ended:
                start = time.monotonic()

                def done(number: int, problem: str | None) -> None:
                    ended.add(number)
                    job, out = work[number]
                    what = "finished" if problem is None else f"FAILED: {problem}"
                    place = f"[{len(ended)} of {len(work)}, {time.monotonic() - start:.0f} s after the start]"
                    tqdm.write(f"{place} {job.arm}, seed {job.seed}: {what}", file=sys.stderr)
                    if store is not None and problem is None:
                        store.add([record_of(job, out)])

                problems = sweep(
                    work,
                    workers=execution.workers,
                    cluster=execution.cluster,
                    isolated=execution.isolated,
                    done=done,
                )
        for number, (job, out) in enumerate(jobs):
            if number not in found and job.is_finished(out):
                found[number] = record_of(job, out)
        records = [*earlier, *(record for _, record in sorted(found.items()))]
        if records:
            write_records(execution.folder / "records.jsonl", records)
    if problems:
        listed = "\n  ".join(problems)
        raise RunFailedError(
            f"{len(problems)} of {len(jobs)} runs failed; repeat the command to retry them:\n  {listed}"
        )
    return records


def _wait_until_free(folder: Path) -> None:
    """Wait until no process works in `folder`. If a study is killed, its last job may continue for a while."""
    waited = False
    while folder.exists():  # locking would create the folder
        try:
            with RunFolder(folder).locked():
                return
        except FolderInUseError:
            if not waited:
                log(f"an earlier process is still working in {folder}; waiting for it to end")
            waited = True
            time.sleep(1)


def _find(jobs: Sequence[tuple[Job, Path]], folder: Path, store: RecordStore | None) -> dict[int, Record]:
    """Return the records of finished jobs, from their folders or from the store, by number, and add them to the store.

    Another process may be working in the folders, so folders of unfinished runs are not changed.
    """
    found: dict[int, Record] = {}
    counts: dict[Path, int] = {}
    for number, (job, out) in enumerate(jobs):
        kept = None if store is None else store.find(job)
        record, path = _record_in(job, out), folder
        if record is None and kept is not None:
            record, path = kept
        if record is not None:
            found[number] = record
            counts[path] = counts.get(path, 0) + 1
    if found:
        where = ", ".join(f"{count} in {path}" for path, count in counts.items())
        log(f"{len(found)} of {len(jobs)} runs are already finished: {where}")
        if store is not None:
            store.add([*found.values()])
    return found


def _record_in(job: Job, out: Path) -> Record | None:
    """Return the record of a job; None if it is not finished. Raise a LabError if it had other options."""
    if not is_finished(out):
        return None
    try:
        record = record_of(job, out)
    except LabError:  # training has ended, but not the work after it
        return None
    return record if job.is_finished(out) else None
