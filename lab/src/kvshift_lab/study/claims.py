"""Claims of the paper beside measured numbers, and the verdicts that these numbers allow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvshift_lab.analysis.learning import StepsComparison, StepsToLevel
from kvshift_lab.core.statistics import Estimate, difference_interval, mean_of, t_interval

Direction = Literal["holds", "fails", "not shown", "not testable here"]

# From the outcome of a comparison to the direction of the claim that ours are higher, or sooner.
_OF_OUTCOME: dict[str, Direction] = {"higher": "holds", "lower": "fails", "sooner": "holds", "later": "fails"}


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
    mean, seeds = mean_of(differences).mean, len(differences)
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


def _number(value: float, *scale: float, signed: bool = False) -> str:
    """Format `value` with 4 to 9 decimals, enough for two significant figures of the smallest number in `scale`.

    With fewer decimals, the end of an interval that is closer to 0 could be printed as 0.0000.
    """
    smallest = min((abs(end) for end in (*scale, value) if end != 0), default=1.0)
    decimals = min(9, max(4, 1 - math.floor(math.log10(smallest))))
    return f"{value:{'+' if signed else ''}.{decimals}f}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the paper beside the measured numbers.

    Attributes:
        statement: the claim.
        paper: number or words of the paper.
        ours: measured numbers, with their interval over seeds.
        direction: "holds" or "fails" if the measured numbers decide the claim, "not shown" if they do not, and "not
            testable here" if no outcome of such a small experiment could.
        note: size of the measured effect beside the paper's, or the reason why the two cannot be compared.
        own: whether this is a question of this project, not a claim of the paper.
        by: "arithmetic" if that decided the direction instead of runs; otherwise empty.
    """

    statement: str
    paper: str
    ours: str
    direction: Direction
    note: str
    own: bool = False
    by: str = ""


question = partial(Claim, paper="not asked", own=True)
"""Make a `Claim` for a question that the paper does not ask."""


def lower_loss(
    statement: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    names: tuple[str, str] = ("KV-shift", "vanilla"),
    paper: str = "",
    note: str = "",
) -> Claim:
    """Return the claim that our losses are lower than theirs, paired by seed.

    Args:
        statement: the claim.
        ours, theirs: losses in nats per token; if only differences are known, the differences and zeros.
        names: names of both models.
        paper: number or words of the paper; if empty, the paper does not ask the question.
        note: as in `Claim`; if empty, the means of both.
    """
    return Claim(
        statement=statement,
        paper=paper or "not asked",
        ours=verdict(minus(ours, theirs), names=names).text,
        direction=lower(ours, theirs),
        note=note or f"nats per token: {statistics.fmean(ours):.4f} against {statistics.fmean(theirs):.4f}",
        own=not paper,
    )


def holds_if(holds: bool) -> Direction:
    """Return the direction of a claim that does not depend on seeds."""
    return "holds" if holds else "fails"


def not_testable(claim: Claim, why: str) -> Claim:
    """Return the claim with its numbers as not testable: no numbers could decide it.

    Args:
        claim: claim of a small experiment.
        why: what the experiment lacks.
    """
    return replace(claim, direction="not testable here", note=f"{why}; {claim.note}")


def higher(ours: Sequence[float], theirs: Sequence[float]) -> Direction:
    """Decide whether ours are higher, by the 95 % t-interval of the differences, paired by seed, as in `verdict`."""
    return _OF_OUTCOME.get(verdict(minus(ours, theirs)).outcome, "not shown")


def lower(ours: Sequence[float], theirs: Sequence[float]) -> Direction:
    """Decide whether ours are lower; see `higher`."""
    return higher(theirs, ours)


def within(ours: Sequence[float], theirs: Sequence[float], *, margin: float) -> Direction:
    """Decide whether the two differ by less than `margin`: the 95 % interval of the differences must lie inside it.

    These are two one-sided tests at 2.5 % each. If the interval lies completely outside on one side, the claim fails;
    otherwise nothing is shown. If all differences are 0 there is no spread for an interval, and the sign test decides.
    """
    differences = minus(ours, theirs)
    if not any(differences):
        return sign_test(len(differences), 0)
    interval = difference_interval(differences)
    if interval is None:
        return "not shown"
    if -margin < interval[0] and interval[1] < margin:
        return "holds"
    return "fails" if interval[0] >= margin or interval[1] <= -margin else "not shown"


def sign_test(right: int, wrong: int) -> Direction:
    """Decide a claim by the exact two-sided sign test over seeds, at 5 %, as a 95 % interval does.

    Six of six seeds decide it, five of five do not (p = 0.0625); with nine or ten seeds, one may disagree.

    Args:
        right: number of seeds in which the claim is right.
        wrong: number of seeds in which it is wrong; undecided seeds are in neither number.
    """
    seeds, most = right + wrong, max(right, wrong)
    by_chance = sum(math.comb(seeds, count) for count in range(most, seeds + 1)) / 2**seeds
    if right == wrong or by_chance > 0.025:
        return "not shown"
    return "holds" if right > wrong else "fails"


def sooner(found: StepsComparison) -> Direction:
    """Decide whether ours reached the level sooner, by the interval of the ratio of steps.

    Without an interval, because a run has not reached the level or the seeds do not vary, the sign test over the seeds
    whose order is known decides.
    """
    if found.low is None:
        return sign_test(found.seeds_sooner, found.seeds_later)
    return _OF_OUTCOME.get(found.outcome, "not shown")


def at_most(found: StepsComparison, ratio: float) -> Direction:
    """Decide whether the ratio of steps is at most `ratio`, by its interval, or else by a sign test of the bounds."""
    if found.high is not None and found.low is not None:
        return "holds" if found.high <= ratio else "fails" if found.low > ratio else "not shown"
    if found.at_most is not None and found.at_most <= ratio:
        return sign_test(found.seeds, 0)
    if found.at_least is not None and found.at_least > ratio:
        return sign_test(0, found.seeds)
    return "not shown"


def reached(found: StepsToLevel, within: float) -> Direction:
    """Decide whether a model reaches its level by step `within`, by the interval of the mean number of steps.

    If a seed has not reached the level, or there is no interval for another reason, the sign test decides.
    """
    interval = found.interval()
    if interval is None:
        soon = sum(step <= within for step in found.reached)
        return sign_test(soon, len(found.steps) - soon)
    return "holds" if interval[1] < within else "not shown"


def percent(values: Sequence[float]) -> str:
    """Format the mean of shares in per cent, with its interval cut at 0 and 100; the text names each cut."""
    mean = f"{100 * statistics.fmean(values):.1f} %"
    if len(values) == 1:
        return f"{mean} (1 seed)"
    if len(set(values)) == 1:
        return f"{mean} in each of {len(values)} seeds"
    low, high = t_interval(values)
    cuts = " and ".join(end for end, cut in (("0", low < 0), ("100", high > 1)) if cut)
    low, high = (100 * min(1, max(0, end)) for end in (low, high))
    cut = f", cut at {cuts}" if cuts else ""
    return f"{mean} (95 % interval {low:.1f} to {high:.1f}{cut}, {len(values)} seeds)"


def points(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Format the difference of shares in percentage points, paired by seed, with its interval.

    Digits are added if a nonzero end of the interval would be printed as 0.
    """
    differences = minus(ours, theirs)
    if not any(differences) and len(differences) > 1:
        return f"no difference in any of {len(differences)} seeds"
    interval = difference_interval(differences)
    low, high = (100 * end for end in interval or (0, 0))
    digits = 1
    while any(end != 0 and round(end, digits) == 0 for end in (low, high)):
        digits += 1
    ends = interval and f"{low:+.{digits}f} to {high:+.{digits}f}"
    return _with_ends(f"{100 * statistics.fmean(differences):+.{digits}f} points", len(differences), ends)


def times(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Format the ratio of numbers given as logarithms, paired by seed: the geometric mean with its interval."""
    logs = minus(ours, theirs)
    interval = difference_interval(logs)
    ends = interval and " to ".join(f"{math.exp(end):.2f}" for end in interval)
    return _with_ends(f"times {math.exp(statistics.fmean(logs)):.2f}", len(logs), ends)


def _with_ends(mean: str, seeds: int, ends: str | None) -> str:
    if seeds == 1:
        return f"{mean} (1 seed)"
    if ends is None:
        return f"{mean} in each of {seeds} seeds, which gives no interval"
    return f"{mean} (95 % interval {ends})"


def minus(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the differences of paired numbers."""
    return [one - other for one, other in zip(ours, theirs, strict=True)]
