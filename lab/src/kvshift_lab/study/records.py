"""Records of the runs of a recipe, with one JSON object on each line.

RESULTS/RECIPE/PRESET.jsonl           all runs of a preset; the results page is made from these records
RESULTS/RECIPE/PRESET.partial.jsonl   the runs that are finished, until all are
RESULTS/STUDY/PRESET.jsonl            the runs of all finished recipes of a study, which share runs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.json_lines import read_lines, write_lines
from kvshift_lab.study.arm import Arm, arm_from_label
from kvshift_lab.study.entry import Grid
from kvshift_lab.study.jobs import RunJob
from kvshift_lab.study.recipe import Job, Recipe, Record

_ENVIRONMENT_FIELDS = ("started", "commit", "versions", "hardware", "platform")


def record_of(job: Job, out: Path) -> Record:
    """Return the record of a finished job, without parts of its environment that may contain local paths."""
    found = job.record(out)
    environment = {name: found["environment"].get(name) for name in _ENVIRONMENT_FIELDS}
    if "continued" in found["environment"]:
        environment["continued"] = [
            {name: part.get(name) for name in ("step", *_ENVIRONMENT_FIELDS)}
            for part in found["environment"]["continued"]
        ]
    return Record(arm=job.arm, seed=job.seed, tuning_for=_tuning_for(job), **{**found, "environment": environment})


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Replace all records of a file atomically."""
    write_lines(path, map(_line_from_record, records))


def read_records(path: Path) -> list[Record]:
    """Return the records in a file. Raise a LabError that names the file and line of an error."""
    records = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            records.append(_record_from_line(line))
        except (TypeError, KeyError) as error:
            raise LabError(f"{path}:{number}: not a record of a recipe: {error}") from error
    return records


def _line_from_record(record: Record) -> dict[str, Any]:
    arms = {"arm": record.arm.to_json(), "tunes": record.tuning_for and record.tuning_for.to_json()}
    return {"tunes" if name == "tuning_for" else name: value for name, value in vars(record).items()} | arms


def _record_from_line(line: dict[str, Any]) -> Record:
    """Return the record of a line. In lines written before `Arm` existed, arms are identified by labels."""
    tuned = line.pop("tunes", None)
    if "label" not in line:
        return Record(**{**line, "arm": Arm(**line["arm"]), "tuning_for": tuned and Arm(**tuned)})
    label = line.pop("label")
    if tuned is None:
        return Record(arm=arm_from_label(label), **line)
    arm = arm_from_label(tuned)
    rate = line["options"]["optimizer"]["learning_rate"]
    return Record(**{**line, "arm": replace(arm, rate=rate), "tuning_for": arm})


def load_records(results: Path, recipe: Recipe, preset: str) -> list[Record] | None:
    """Return all records of a preset; None if there is no file, or if runs are missing from the records of its study.

    From the records of a study, select the arms of the recipe with the seeds that all these arms have. Records of an
    older setting, or of the bundled text, are not among them.
    """
    path = results / recipe.entry.runs / f"{preset}.jsonl"
    if not path.exists():
        return None
    records = read_records(path)
    if recipe.entry.study is None:
        return records
    size = recipe.presets[preset]
    jobs = {job.arm: job for job in recipe.arms(preset)}
    arms = {*jobs}
    ours = [record for record in records if _is_of(record, jobs.get(record.tuning_for or record.arm), size.grid)]
    seeds = [{record.seed for record in ours if record.tuning_for is None and record.arm == arm} for arm in arms]
    shared = set.intersection(*seeds)
    tuned = {record.tuning_for for record in ours if record.tuning_for is not None}
    if not shared >= {*size.seed_numbers()} or (size.grid is not None and tuned != arms):
        return None
    return [record for record in ours if record.tuning_for is not None or record.seed in shared]


def _is_of(record: Record, job: Job | None, grid: Grid | None) -> bool:
    """Return True if a record has the options of the job of its arm, at a rate of the grid if the rate is tuned."""
    if job is None:
        return False
    if isinstance(job, RunJob) and grid is not None:
        rate = record.options["optimizer"]["learning_rate"]
        if rate not in grid.rates:
            return False
        job = job.at_rate(rate) if record.tuning_for is None else job.tuning(rate, steps=grid.steps)
    # Without the digest of its text, because the text on this machine may be another one.
    options = {name: value for name, value in record.options.items() if name != "data_facts"}
    return not any(one.other_options(options) for one in job.with_seeds([record.seed]))


class RecordStore:
    """The records of one preset of a recipe in a folder of results, from which a study can resume on any machine.

    The folder is created. If that is impossible, a LabError is raised.

    Attributes:
        complete_path: file of all runs. A file of an older setting is not changed until `complete`.
        partial_path: file of the runs that are finished so far.
        shared: whether the recipes of a study share these files, so that each adds its records to those of the others.
    """

    def __init__(self, results: Path, recipe: str, preset: str, *, shared: bool = False) -> None:
        self.complete_path = results / recipe / f"{preset}.jsonl"
        self.partial_path = results / recipe / f"{preset}.partial.jsonl"
        self.shared = shared
        try:
            self.complete_path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(f"results: {self.complete_path.parent} cannot be created: {error}") from error

    def find(self, job: Job) -> tuple[Record, Path] | None:
        """Return the record of a job and its file. Raise a LabError if a partial record has other options."""
        for path in (self.partial_path, self.complete_path):
            record = _by_run(path).get((job.arm, job.seed, _tuning_for(job)))
            if record is None:
                continue
            lines = job.other_options(record.options)
            if not lines:
                return record, path
            if path == self.partial_path:
                listed = "\n  ".join(lines)
                raise LabError(
                    f"results: {path} holds {job.arm}, seed {job.seed}, with other options:\n  {listed}\n"
                    "restore these options to resume that study, or remove the file to start a new one"
                )
        return None

    def add(self, records: Sequence[Record]) -> None:
        """Add to the partial file the records that are not in the whole file."""
        with FileLock(self.complete_path.parent / ".lock"):  # other processes may add records
            whole, before = _by_run(self.complete_path), _by_run(self.partial_path)
            runs = {_run_of(record): record for record in records}
            after = before | {run: record for run, record in runs.items() if whole.get(run) != record}
            if after != before:
                write_records(self.partial_path, [*after.values()])

    def complete(self, records: Sequence[Record]) -> None:
        """Replace the whole file and remove the partial one; in shared files, keep the records of other recipes."""
        with FileLock(self.complete_path.parent / ".lock"):
            left: dict[_Run, Record] = {}
            if self.shared:
                ours = {_run_of(record): record for record in records}
                left = {run: record for run, record in _by_run(self.partial_path).items() if run not in ours}
                records = [*(_by_run(self.complete_path) | ours).values()]
            write_records(self.complete_path, records)
            if left:
                write_records(self.partial_path, [*left.values()])
            else:
                self.partial_path.unlink(missing_ok=True)

    def require_no_other_runs(self, jobs: Sequence[Job]) -> None:
        """Raise a LabError if a file has runs other than `jobs`, which would be lost once all jobs are finished.

        A whole file without any run of `jobs` belongs to an older setting and may be replaced. A shared file loses no
        records.
        """
        if self.shared:
            return
        requested = {(job.arm, job.seed, _tuning_for(job)) for job in jobs}
        for path in (self.partial_path, self.complete_path):
            runs = _by_run(path)
            lost = [run for run in runs if run not in requested]
            if lost and (path == self.partial_path or len(lost) < len(runs)):
                arm, seed, _ = lost[0]
                raise LabError(
                    f"results: {path} has {len(lost)} runs that would be lost ({arm}, seed {seed} ...); "
                    "use at least as many seeds as in that file, or remove it"
                )


_Run = tuple[Arm, int, Arm | None]


def _run_of(record: Record) -> _Run:
    return record.arm, record.seed, record.tuning_for


def _by_run(path: Path) -> dict[_Run, Record]:
    """Return the records of a file by run, in the order of the file; {} if it does not exist."""
    return {_run_of(record): record for record in read_records(path)} if path.exists() else {}


def _tuning_for(job: Job) -> Arm | None:
    return job.tuning_for if isinstance(job, RunJob) else None
