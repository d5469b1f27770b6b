"""Every variant of a comparison at its own best learning rate: one grid for all, by seeds that are not reported."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from kvshift.lab.analysis.learning import steps_to
from kvshift.lab.study.arm import Arm
from kvshift.lab.study.entry import Grid
from kvshift.lab.study.jobs import RunJob
from kvshift.lab.study.recipe import Job, Record, Score, accuracy_curve, diverged, last_mean


def tuning_jobs(jobs: Sequence[Job], grid: Grid) -> list[RunJob]:
    """Each of `jobs` that trains, with the seeds of the grid, at each rate of it and for its steps."""
    return [job.tuning(rate, steps=grid.steps) for job in jobs if isinstance(job, RunJob) for rate in grid.rates]


def at_best_rates(jobs: Sequence[Job], best: Mapping[Arm, float]) -> list[Job]:
    """Each of `jobs`, which are reported, at the best rate of its arm; what trains nothing as it is."""
    return [job.at_rate(best[job.arm]) if isinstance(job, RunJob) else job for job in jobs]


def best_rates(records: Sequence[Record], score: Score | None) -> dict[Arm, float]:
    """Of each arm, the rate with the highest mean score over the tuning seeds; of equals the lowest.

    Args:
        records: of the tuning runs alone.
        score: the means over seeds of its numbers are compared one after the other.
    """
    assert score is not None, "a recipe with a grid says by what it is tuned"

    def mean(runs: Sequence[Record]) -> tuple[float, ...]:
        return tuple(statistics.fmean(numbers) for numbers in zip(*map(score, runs), strict=True))

    return {
        arm: max(sorted(by_rate), key=lambda rate: mean(by_rate[rate]))  # called at once
        for arm, by_rate in by_tuned_arm(records).items()
    }


def by_tuned_arm(records: Sequence[Record]) -> dict[Arm, dict[float, list[Record]]]:
    """Tuning runs by arm and learning rate."""
    found: dict[Arm, dict[float, list[Record]]] = {}
    for record in records:
        assert record.tunes is not None
        rate = record.options["optimizer"]["learning_rate"]
        found.setdefault(record.tunes, {}).setdefault(rate, []).append(record)
    return found


def reached_soonest(name: str, level: float, *, last: int) -> Score:
    """Score by accuracy `name` at the end, `level` being as good as more; of those that reach it, by how soon.

    Args:
        name: of the accuracy.
        level: which is as good as any more.
        last: evaluations whose mean is the accuracy at the end.
    """

    def score(record: Record) -> tuple[float, ...]:
        steps, accuracy = accuracy_curve(record, name)
        reached = steps_to(steps, accuracy, level)
        final = min(last_mean(record, name, last), level)
        return final, -float(record.options["steps"] if reached is None else reached)

    at_end = f"the accuracy at the end (mean of {last})"
    return Score(score, f"{at_end} up to {100 * level:g} %, and of those that reach it by how soon")


def least_loss(*, last: int = 1) -> Score:
    """Score by the validation loss, the mean of the `last` evaluations; lower is better, and to diverge is worst."""
    return Score(
        lambda record: (-math.inf if diverged(record) else -last_mean(record, "loss", last),),
        "the validation loss at the end",
    )
