"""Statistics of measured differences: means with standard errors, t-intervals, verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error (the sample standard deviation over the root of n; None for n = 1)."""

    mean: float
    stderr: float | None
    n: int


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        outcome: "lower" or "higher" if the first model's loss is lower or higher than the second's, "no difference
            shown" if the interval contains 0, and "undecided" with one seed or seeds that do not vary.
        text: the outcome in words, with its numbers.
        difference: mean difference over seeds.
        low, high: ends of the interval of the difference; None if there is no interval.
        seeds: number of seeds.
    """

    outcome: Literal["lower", "higher", "no difference shown", "undecided"]
    text: str
    difference: float
    low: float | None
    high: float | None
    seeds: int


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


def verdict(
    differences: Sequence[float], *, rows: Estimate | None = None, names: tuple[str, str] = ("KV-shift", "vanilla")
) -> Verdict:
    """Return the verdict of a comparison, worded no more strongly than its interval allows.

    Args:
        differences: final loss of the first model minus that of the second, one for each seed.
        rows: with a single seed, the same difference paired by validation sequence, for its standard error.
        names: names of the two models.

    Returns:
        With 2 seeds or more, "lower by d" for the model whose loss is lower if the 95 % t-interval excludes 0, and
        "no difference shown" otherwise. With one seed the variance between seeds is unknown, and the text says so.
    """
    _check(differences)
    mean, seeds = statistics.fmean(differences), len(differences)
    ours, theirs = names
    if seeds == 1:
        return Verdict("undecided", _one_seed(mean, rows, ours, theirs), mean, None, None, 1)
    interval = difference_interval(differences)
    if interval is None:
        text = (
            f"undecided: all {seeds} seeds differ by exactly {_number(abs(mean))} ({ours if mean < 0 else theirs} "
            "lower); differences that agree to the last bit are not independent, so there is no interval"
        )
        return Verdict("undecided", text, mean, None, None, seeds)
    low, high = interval
    if low <= 0 <= high:
        signed, start, end = (_number(value, low, high, signed=True) for value in (mean, low, high))
        text = f"no difference shown: {ours} minus {theirs} is {signed} (95 % interval {start} to {end}, {seeds} seeds)"
        return Verdict("no difference shown", text, mean, low, high, seeds)
    better, near, far = (ours, -high, -low) if mean < 0 else (theirs, low, high)
    text = (
        f"{better} lower by {_number(abs(mean), near, far)} "
        f"(95 % interval {_number(near, near, far)} to {_number(far, near, far)}, {seeds} seeds)"
    )
    return Verdict("lower" if mean < 0 else "higher", text, mean, low, high, seeds)


def _one_seed(mean: float, rows: Estimate | None, ours: str, theirs: str) -> str:
    size = _number(mean, signed=True)
    error = ""
    if rows is not None and rows.stderr is not None:
        error = f" (standard error over {rows.n} validation sequences {_number(rows.stderr)})"
    return (
        f"{ours} minus {theirs} is {size} in this one pair of runs{error}; "
        "how much another seed changes that is unknown"
    )


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


def _number(value: float, *scale: float, signed: bool = False) -> str:
    """Format `value` with 4 to 9 decimals, enough for two significant figures of the smallest number in `scale`.

    With fewer decimals, the end of an interval that is closer to 0 could be printed as 0.0000.
    """
    smallest = min((abs(end) for end in (*scale, value) if end != 0), default=1.0)
    decimals = min(9, max(4, 1 - math.floor(math.log10(smallest))))
    return f"{value:{'+' if signed else ''}.{decimals}f}"
