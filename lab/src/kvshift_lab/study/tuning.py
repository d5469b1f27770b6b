"""Tuning the learning rate of each variant of a comparison, on one grid and with seeds that are not reported."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from kvshift_lab.analysis.learning import steps_to
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.entry import Grid
from kvshift_lab.study.jobs import RunJob
from kvshift_lab.study.recipe import Job, Record, Score, accuracy_curve, last_mean


def tuning_jobs(jobs: Sequence[Job], grid: Grid) -> list[RunJob]:
    """Return the tuning runs of `jobs`, which have the seeds of the grid: one for each training job and rate."""
    return [job.tuning(rate, steps=grid.steps) for job in jobs if isinstance(job, RunJob) for rate in grid.rates]


def at_best_rates(jobs: Sequence[Job], best: Mapping[Arm, float]) -> list[Job]:
    """Return the reported `jobs` at the best rate of their arms; jobs that train nothing are unchanged."""
    return [job.at_rate(best[job.arm]) if isinstance(job, RunJob) else job for job in jobs]


def best_rates(records: Sequence[Record], score: Score) -> dict[Arm, float]:
    """Return the rate of each arm with the highest mean score over the tuning seeds; the lowest one in case of a tie.

    Args:
        records: records of the tuning runs only.
        score: score whose numbers are averaged over seeds and then compared as a tuple.
    """

    def mean(runs: Sequence[Record]) -> tuple[float, ...]:
        return tuple(statistics.fmean(numbers) for numbers in zip(*map(score, runs), strict=True))

    return {
        arm: max(sorted(by_rate), key=lambda rate: mean(by_rate[rate]))  # called immediately
        for arm, by_rate in by_tuned_arm(records).items()
    }


def by_tuned_arm(records: Sequence[Record]) -> dict[Arm, dict[float, list[Record]]]:
    """Return the tuning runs by arm and learning rate."""
    found: dict[Arm, dict[float, list[Record]]] = {}
    for record in records:
        assert record.tuning_for is not None
        rate = record.options["optimizer"]["learning_rate"]
        found.setdefault(record.tuning_for, {}).setdefault(rate, []).append(record)
    return found


def reached_soonest(name: str, level: float, *, last: int) -> Score:
    """Score runs by their final accuracy up to `level`, and runs that reach `level` by how soon they do.

    Args:
        name: name of the accuracy.
        level: accuracy above which more is not better.
        last: number of evaluations whose mean is the final accuracy.
    """

    def score(record: Record) -> tuple[float, ...]:
        steps, accuracy = accuracy_curve(record, name)
        reached = steps_to(steps, accuracy, level)
        final = min(last_mean(record, name, last), level)
        return final, -float(record.options["steps"] if reached is None else reached)

    at_end = f"the accuracy at the end (mean of {last})"
    return Score(score, f"{at_end} up to {100 * level:g} %, then how soon it is reached")
