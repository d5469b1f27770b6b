"""What a recipe consists of, and the records that it draws from."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure

from kvshift.lab.study.arm import Arm
from kvshift.lab.study.claims import Claim
from kvshift.lab.study.entry import Entry, Preset


class Job(Protocol):
    """One unit of work, which leaves what it found in a folder of its own. Jobs travel to other processes."""

    @property
    def arm(self) -> Arm:
        """Which arm of the study; with the seed it names the job."""
        ...

    @property
    def seed(self) -> int:
        """Jobs of one seed are pairs: they see the same data."""
        ...

    def is_finished(self, out: Path) -> bool:
        """Whether `out` holds all that `record` reads; a LabError where it holds the work of other options."""
        ...

    def other_options(self, options: Mapping[str, Any]) -> list[str]:
        """A line for each option that is another in those of a record than here, by the comparison of `is_finished`."""
        ...

    def run(self, out: Path) -> None:
        """Do the work, or resume it, or find that it is done."""
        ...

    def progress(self, out: Path) -> tuple[int, int]:
        """How many steps are done, and of how many; asked while another process does the work."""
        ...

    def record(self, out: Path) -> dict[str, Any]:
        """What is kept of it, as JSON: "options" and their "config_hash", "environment", "curve", "result"."""
        ...


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is kept of one job: a line of `results/RECIPE/PRESET.jsonl`.

    Attributes:
        arm: which arm of the study.
        seed: of the job.
        config_hash: of all options that decide numbers.
        options: the options themselves.
        environment: commit, versions, hardware, start.
        curve: by name, values over training; "step" is their place. May be empty.
        result: final numbers.
        tunes: the arm whose learning rate this run helped to choose; None: it is reported.
    """

    arm: Arm
    seed: int
    config_hash: str
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    curve: Mapping[str, Sequence[float | None]]
    result: Mapping[str, Any]
    tunes: Arm | None = None


@dataclass(frozen=True)
class Score:
    """How well a run went, called with its record.

    Attributes:
        numbers: which are compared one after the other; higher is better.
        says: what they are, in words.
    """

    numbers: Callable[[Record], tuple[float, ...]]
    says: str

    def __call__(self, record: Record) -> tuple[float, ...]:
        return self.numbers(record)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A figure or table of the paper.

    Attributes:
        entry: its name, title and presets.
        source: where it stands in the paper.
        jobs: of a preset, for some seeds, the longest first.
        plot: the figure, from the records of one preset.
        claims: what the paper says and what the records show.
        tuned_by: by what a variant's best learning rate is chosen, where a preset has a grid.
        tables: in Markdown, from all records, those that chose a learning rate too; None: the report has none.
        scored: the accuracy whose steps to 90 % and 99 % the report lists by model, over seeds; None: it has no such.
        notes: what the paper leaves open or has wrong, and what was chosen; `find_recipe` adds those in its folder.
    """

    entry: Entry
    source: str
    jobs: Callable[[str, Sequence[int]], Sequence[Job]]
    plot: Callable[[Sequence[Record]], Figure]
    claims: Callable[[Sequence[Record]], Sequence[Claim]]
    tuned_by: Score | None = None
    tables: Callable[[Sequence[Record]], str] | None = None
    scored: str | None = None
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        """As typed: "fig01a"."""
        return self.entry.name

    @property
    def title(self) -> str:
        """One line."""
        return self.entry.title

    @property
    def presets(self) -> Mapping[str, Preset]:
        """By name: "smoke", "laptop", "paper"."""
        return self.entry.presets


def reported(records: Sequence[Record]) -> list[Record]:
    """Those that claims and figures are about: no run that chose a learning rate."""
    return [record for record in records if record.tunes is None]


def diverged(record: Record) -> bool:
    """Whether the run ended because a number was not finite."""
    return "diverged_at" in record.result


def by_arm(records: Sequence[Record]) -> dict[Arm, dict[int, Record]]:
    """The records of each arm, in the order in which these come; of each by seed, lowest first: seeds are pairs."""
    found: dict[Arm, dict[int, Record]] = {}
    for record in records:
        found.setdefault(record.arm, {})[record.seed] = record
    return {arm: dict(sorted(seeds.items())) for arm, seeds in found.items()}


def curves_by_label(records: Sequence[Record], name: str) -> dict[str, dict[int, tuple[list[float], list[float]]]]:
    """The curves of that name, for a figure: by the label of the arm, then by seed."""
    return {arm.label: accuracy_curves(seeds, name) for arm, seeds in by_arm(records).items()}


def accuracy_curves(seeds: Mapping[int, Record], name: str) -> dict[int, tuple[list[float], list[float]]]:
    """The curve of each seed; see `accuracy_curve`."""
    return {seed: accuracy_curve(record, name) for seed, record in seeds.items()}


def accuracy_curve(record: Record, name: str) -> tuple[list[float], list[float]]:
    """Steps, and at each the accuracy of that name."""
    pairs = zip(record.curve["step"], record.curve[name], strict=True)
    points = [(float(step), float(value)) for step, value in pairs if step is not None and value is not None]
    return [step for step, _ in points], [value for _, value in points]


def value_at(record: Record, name: str, step: float) -> float:
    """A curve after so many steps, by a straight line between evaluations; beyond its ends, the value there."""
    return float(np.interp(step, *accuracy_curve(record, name)))


def last_loss(record: Record) -> float:
    """The validation loss after the last step."""
    return accuracy_curve(record, "loss")[1][-1]


def paired_losses(ours: Mapping[int, Record], theirs: Mapping[int, Record]) -> list[tuple[float, float]] | None:
    """The last losses of two arms, a pair for each seed; None where a run diverged: then there is no interval."""
    if any(map(diverged, (*ours.values(), *theirs.values()))):
        return None
    return [(last_loss(ours[seed]), last_loss(theirs[seed])) for seed in ours]


def last_mean(record: Record, name: str, evaluations: int) -> float:
    """The mean of a curve over its last evaluations, which a spike at the last step moves little.

    Args:
        record: of a run.
        name: of the curve.
        evaluations: how many; all, where there are fewer.
    """
    return statistics.fmean(accuracy_curve(record, name)[1][-evaluations:])
