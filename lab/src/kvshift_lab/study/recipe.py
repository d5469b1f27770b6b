"""The parts of a recipe, and the records that its figure and claims are made from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure

from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.entry import Entry, Preset


class Job(Protocol):
    """One unit of work, which writes its results to a separate folder. Jobs are pickled for other processes."""

    @property
    def arm(self) -> Arm:
        """The arm of the study; arm and seed identify the job."""
        ...

    @property
    def seed(self) -> int:
        """The random seed; jobs with equal seeds are paired: they see the same data."""
        ...

    def with_seeds(self, seeds: Sequence[int]) -> Sequence[Job]:
        """Return the same job with each of these seeds, or the job alone if nothing in it is random."""
        ...

    def is_finished(self, out: Path) -> bool:
        """Return True if `out` has all that `record` reads. Raise a LabError if it was made with other options."""
        ...

    def other_options(self, options: Mapping[str, Any]) -> list[str]:
        """Return a line for each option of a record that differs from this job's, compared as in `is_finished`."""
        ...

    def run(self, out: Path) -> None:
        """Do the work, or resume it; do nothing if it is finished."""
        ...

    def progress(self, out: Path) -> tuple[int, int]:
        """Return the number of completed steps and of all steps; called while another process does the work."""
        ...

    def record(self, out: Path) -> dict[str, Any]:
        """Return the record as JSON: "options" and their "config_hash", "environment", "curve", "result"."""
        ...


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one job: a line of `results/RECIPE/PRESET.jsonl`.

    Attributes:
        arm: arm of the study.
        seed: seed of the job.
        config_hash: hash of all options that affect results.
        options: the options themselves.
        environment: commit, versions, hardware and start time.
        curve: values over training, by name, at the steps of the entry "step". May be empty.
        result: final numbers.
        tuning_for: the arm whose learning rate this run helped to choose; None for a reported run.
    """

    arm: Arm
    seed: int
    config_hash: str
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    curve: Mapping[str, Sequence[float | None]]
    result: Mapping[str, Any]
    tuning_for: Arm | None = None


@dataclass(frozen=True)
class Score:
    """A score of runs, which is called with a record.

    Attributes:
        numbers: returns numbers that are compared as a tuple; higher is better.
        description: these numbers in words.
    """

    numbers: Callable[[Record], tuple[float, ...]]
    description: str

    def __call__(self, record: Record) -> tuple[float, ...]:
        return self.numbers(record)


LEAST_LOSS = Score(
    lambda record: (-math.inf if has_diverged(record) else -last_loss(record),), "the validation loss at the end"
)
"""The lowest validation loss after the last step; a run that diverged has the lowest score."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A figure or table of the paper.

    Attributes:
        entry: name, title and presets.
        source: place in the paper.
        arms: returns a job for each arm of a preset, the longest first; the seeds are added to them.
        plot: makes the figure from the records of one preset.
        claims: compares the claims of the paper with the records.
        tuned_by: score that chooses the best learning rate of each variant of a preset with a grid.
        tables: makes Markdown tables from all records, including the tuning runs; None for no tables.
        scored: name of the accuracy for which the report lists the steps to 90 % and 99 % by model; None for none.
        notes: gaps and errors in the paper and the choices made here; `find_recipe` adds the notes in the folder.
    """

    entry: Entry
    source: str
    arms: Callable[[str], Sequence[Job]]
    plot: Callable[[Sequence[Record]], Figure]
    claims: Callable[[Sequence[Record]], Sequence[Claim]]
    tuned_by: Score = LEAST_LOSS
    tables: Callable[[Sequence[Record]], str] | None = None
    scored: str | None = None
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name, as typed on the command line: "fig01a"."""
        return self.entry.name

    @property
    def title(self) -> str:
        """The title, in one line."""
        return self.entry.title

    @property
    def presets(self) -> Mapping[str, Preset]:
        """The presets by name: "smoke", "laptop", "paper"."""
        return self.entry.presets

    def jobs(self, preset: str, seeds: Sequence[int]) -> list[Job]:
        """Return the jobs of a preset: each arm with each seed."""
        return [job for arm in self.arms(preset) for job in arm.with_seeds(seeds)]


def without_tuning_runs(records: Sequence[Record]) -> list[Record]:
    """Return the records for claims and figures, without the tuning runs."""
    return [record for record in records if record.tuning_for is None]


def has_diverged(record: Record) -> bool:
    """Return True if the run ended because a number was not finite."""
    return "diverged_at" in record.result


def by_arm(records: Sequence[Record]) -> dict[Arm, dict[int, Record]]:
    """Return the records of each arm by seed, with arms in order of appearance and seeds ascending, for pairing."""
    found: dict[Arm, dict[int, Record]] = {}
    for record in records:
        found.setdefault(record.arm, {})[record.seed] = record
    return {arm: dict(sorted(seeds.items())) for arm, seeds in found.items()}


def curves_by_label(records: Sequence[Record], name: str) -> dict[str, dict[int, tuple[list[float], list[float]]]]:
    """Return the curves `name` for a figure, by the label of the arm and then by seed."""
    return {arm.label: accuracy_curves(seeds, name) for arm, seeds in by_arm(records).items()}


def accuracy_curves(seeds: Mapping[int, Record], name: str) -> dict[int, tuple[list[float], list[float]]]:
    """Return the curve of each seed; see `accuracy_curve`."""
    return {seed: accuracy_curve(record, name) for seed, record in seeds.items()}


def accuracy_curve(record: Record, name: str) -> tuple[list[float], list[float]]:
    """Return the steps of the curve `name` and its values at these steps, without missing values."""
    pairs = zip(record.curve["step"], record.curve[name], strict=True)
    points = [(float(step), float(value)) for step, value in pairs if step is not None and value is not None]
    return [step for step, _ in points], [value for _, value in points]


def value_at(record: Record, name: str, step: float) -> float:
    """Return a curve at `step`, interpolated linearly between evaluations; beyond its ends, the value there."""
    return float(np.interp(step, *accuracy_curve(record, name)))


def last_loss(record: Record) -> float:
    """Return the validation loss after the last step."""
    return accuracy_curve(record, "loss")[1][-1]


def paired_losses(ours: Mapping[int, Record], theirs: Mapping[int, Record]) -> list[tuple[float, float]] | None:
    """Return the last losses of two arms, paired by seed; None if a run diverged, because there is no interval then."""
    if any(map(has_diverged, (*ours.values(), *theirs.values()))):
        return None
    return [(last_loss(ours[seed]), last_loss(theirs[seed])) for seed in ours]


def last_mean(record: Record, name: str, evaluations: int) -> float:
    """Return the mean of a curve over its last evaluations, so that a spike at the last step has little effect.

    Args:
        record: record of a run.
        name: name of the curve.
        evaluations: number of evaluations; if there are fewer, all are used.
    """
    return statistics.fmean(accuracy_curve(record, name)[1][-evaluations:])
