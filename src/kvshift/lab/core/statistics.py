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
    """What a comparison has shown.

    Attributes:
        outcome: the first model's loss is "lower" or "higher" than the second's; "undecided" with one seed, or
            seeds that do not vary.
        text: the outcome in words, with its numbers.
        difference: mean over seeds.
        low, high: ends of the interval of the difference; None where there is none.
    """

    outcome: Literal["lower", "higher", "no difference shown", "undecided"]
    text: str
    difference: float
    low: float | None
    high: float | None
    seeds: int


def mean_of(values: Sequence[float]) -> Estimate:
    """Mean and standard error of independent values."""
    _check(values)
    if len(values) == 1:
        return Estimate(float(values[0]), None, 1)
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values))


def paired_difference(ours: Sequence[float], theirs: Sequence[float], weights: Sequence[float]) -> Estimate:
    """Weighted mean of `ours[i] - theirs[i]`, such as the loss of sequences by their tokens, with its standard error.

        d = sum(w_i d_i) / sum(w_i),  stderr = std(w_i (d_i - d)) / (mean(w) sqrt(n))

    which for equal weights is that of a plain mean.
    """
    if not len(ours) == len(theirs) == len(weights):
        raise ValueError(f"pairs need as many values on both sides, got {len(ours)}, {len(theirs)}, {len(weights)}")
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    _check(differences)
    mean_weight = statistics.fmean(weights)
    mean = statistics.fmean(differences, weights)
    if len(differences) == 1:
        return Estimate(mean, None, 1)
    spread = statistics.stdev([w * (d - mean) for w, d in zip(weights, differences, strict=True)])
    return Estimate(mean, spread / (mean_weight * math.sqrt(len(differences))), len(differences))


def t_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval for the mean of two or more independent, roughly normal values."""
    from scipy.stats import t  # takes half a second to import

    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    estimate = mean_of(values)
    if estimate.stderr is None:
        raise ValueError("an interval needs at least 2 values, got 1")
    half = float(t.ppf((1 + confidence) / 2, estimate.n - 1)) * estimate.stderr
    return estimate.mean - half, estimate.mean + half


def difference_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % t-interval of the mean of differences between two models, one for each seed.

    None where there is none: of one seed, and of seeds that all differ by exactly the same other than 0; equal to the
    last bit, they are not separate runs.
    """
    _check(differences)
    if len(differences) == 1 or (len(set(differences)) == 1 and differences[0] != 0):
        return None
    return t_interval(differences)


def verdict(
    differences: Sequence[float], *, rows: Estimate | None = None, names: tuple[str, str] = ("KV-shift", "vanilla")
) -> Verdict:
    """Word a comparison by its interval, never stronger.

    Args:
        differences: final loss of the first model minus that of the second, one for each seed.
        rows: of a single seed: the same difference paired by validation sequence, for its standard error.
        names: of the two models.

    Returns:
        With 2 seeds or more, "lower by d" for the model whose loss is lower, if the 95 % t-interval leaves 0 out,
        and else "no difference shown". With one seed the noise between seeds is unknown, and the text says so.
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
            "lower); equal to the last bit, they are not separate runs, and no interval can be made of them"
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
    """Spearman's rank correlation of pairs: 1 where both order them alike, -1 where one reverses the other.

    Equal values have the mean of their ranks. None where there is no order to compare: fewer than 3 pairs, or values
    on one side that are all equal.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"pairs need as many values on both sides, got {len(ours)} and {len(theirs)}")
    if len(ours) < 3 or len(set(ours)) == 1 or len(set(theirs)) == 1:
        return None
    _check([*ours, *theirs])
    from scipy.stats import spearmanr  # takes half a second to import

    return float(spearmanr(ours, theirs)[0])  # type: ignore[arg-type]  # declared as an object


def first_reached(steps: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Where a curve first reaches `target` from above, interpolated linearly between its points; None if never.

    A curve that begins at or below the target is given its first point: it may have been there earlier.
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
        raise ValueError("needs at least 1 value, got none")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"values must be finite, got {list(values)}")


def _number(value: float, *scale: float, signed: bool = False) -> str:
    """`value` with the decimals that keep two figures of the smallest of `scale`: 4, up to 9.

    Rounded to fewer, the near end of an interval could read 0.0000 where it is not 0.
    """
    smallest = min((abs(end) for end in (*scale, value) if end != 0), default=1.0)
    decimals = min(9, max(4, 1 - math.floor(math.log10(smallest))))
    return f"{value:{'+' if signed else ''}.{decimals}f}"
