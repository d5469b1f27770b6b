"""Statistics of measured differences: means with standard errors, t-intervals, the step at which a curve crosses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error (the sample standard deviation over the root of n; None for n = 1)."""

    mean: float
    stderr: float | None
    n: int


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean and standard error of independent values."""
    _check(values)
    if len(values) == 1:
        return Estimate(float(values[0]), None, 1)
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values))


def paired_difference(ours: Sequence[float], theirs: Sequence[float], weights: Sequence[float]) -> Estimate:
    """Return the weighted mean of `ours[i] - theirs[i]` and its standard error.

        d = sum(w_i d_i) / sum(w_i),  stderr = std(w_i (d_i - d)) / (mean(w) sqrt(n))

    An example is the loss of sequences, weighted by their tokens. With equal weights, this is the plain mean.
    """
    if not len(ours) == len(theirs) == len(weights):
        raise ValueError(f"ours, theirs, weights must be equally long, got {len(ours)}, {len(theirs)}, {len(weights)}")
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    _check(differences)
    mean_weight = statistics.fmean(weights)
    mean = statistics.fmean(differences, weights)
    if len(differences) == 1:
        return Estimate(mean, None, 1)
    spread = statistics.stdev([w * (d - mean) for w, d in zip(weights, differences, strict=True)])
    return Estimate(mean, spread / (mean_weight * math.sqrt(len(differences))), len(differences))


def t_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return Student's t-interval for the mean of two or more independent, roughly normal values."""
    from scipy.stats import t  # takes half a second to import

    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    estimate = mean_of(values)
    if estimate.stderr is None:
        raise ValueError("an interval needs at least 2 values, got 1")
    half = float(t.ppf((1 + confidence) / 2, estimate.n - 1)) * estimate.stderr
    return estimate.mean - half, estimate.mean + half


def difference_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % t-interval of the mean difference between two models, from one difference for each seed.

    Return None with a single seed, and if all seeds have exactly the same nonzero difference: runs that agree to the
    last bit are not independent.
    """
    _check(differences)
    if len(differences) == 1 or (len(set(differences)) == 1 and differences[0] != 0):
        return None
    return t_interval(differences)


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation of pairs: 1 for the same order, -1 for reversed orders.

    Equal values share the mean of their ranks. Return None if there is no order to compare: with fewer than 3 pairs, or
    if all values on one side are equal.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"ours and theirs must be equally long, got {len(ours)} and {len(theirs)}")
    if len(ours) < 3 or len(set(ours)) == 1 or len(set(theirs)) == 1:
        return None
    _check([*ours, *theirs])
    from scipy.stats import spearmanr  # takes half a second to import

    return float(spearmanr(ours, theirs)[0])  # type: ignore[arg-type]  # declared as an object


def first_reached(steps: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Return the step at which a curve first reaches `target` from above, interpolated linearly; None if it never does.

    For a curve that begins at or below the target, return its first step, an upper bound.
    """
    before: tuple[float, float] | None = None
    for step, loss in zip(steps, losses, strict=True):
        if loss <= target:
            if before is None or before[1] == loss:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (float(step), float(loss))
    return None


def _check(values: Sequence[float]) -> None:
    if not values:
        raise ValueError("at least 1 value is needed, got none")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"values must be finite, got {list(values)}")
