"""A claim of the paper beside what was found, and the words that measured numbers allow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvshift.lab.analysis.learning import Reach, ReachComparison
from kvshift.lab.core.statistics import difference_interval, t_interval, verdict

Direction = Literal["holds", "fails", "not shown", "not testable here"]

# What a comparison of measured numbers says of the claim that ours are the higher, or the sooner.
_OF_OUTCOME: dict[str, Direction] = {"higher": "holds", "lower": "fails", "sooner": "holds", "later": "fails"}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the paper beside what was found.

    Attributes:
        statement: the claim.
        paper: the paper's number, or its words.
        ours: our numbers, with their interval over seeds.
        direction: "holds" and "fails" are said where our numbers decide the matter; "not shown" where they do not;
            "not testable here" where no outcome of such a miniature could.
        size: how large ours is beside the paper's, or why the two cannot be compared.
        own: whether the question is ours: the paper does not claim it.
        by: how the direction was found, where it was not by runs: "arithmetic".
    """

    statement: str
    paper: str
    ours: str
    direction: Direction
    size: str
    own: bool = False
    by: str = ""


question = partial(Claim, paper="not asked", own=True)
"""A claim that is ours to ask: the paper has none."""


def lower_loss(
    statement: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    names: tuple[str, str] = ("KV-shift", "vanilla"),
    paper: str = "",
    size: str = "",
) -> Claim:
    """Whether our losses are lower than theirs, paired by seed.

    Args:
        statement: the claim.
        ours, theirs: losses in nats per token; where only differences are known, these, and zeros.
        names: of both.
        paper: what it has; empty: the question is ours.
        size: empty: the means of both.
    """
    return Claim(
        statement=statement,
        paper=paper or "not asked",
        ours=verdict(_differences(ours, theirs), names=names).text,
        direction=lower(ours, theirs),
        size=size or f"nats per token: {statistics.fmean(ours):.4f} against {statistics.fmean(theirs):.4f}",
        own=not paper,
    )


def decided(holds: bool) -> Direction:
    """Of what no seed changes."""
    return "holds" if holds else "fails"


def not_testable(claim: Claim, why: str) -> Claim:
    """The claim with its numbers, which do not decide it, whatever they are.

    Args:
        claim: of a miniature.
        why: what the miniature lacks.
    """
    return replace(claim, direction="not testable here", size=f"{why}; {claim.size}")


def higher(ours: Sequence[float], theirs: Sequence[float]) -> Direction:
    """Whether ours are higher, paired by seed: as `verdict` has it: by the 95 % t-interval of the differences."""
    return _OF_OUTCOME.get(verdict(_differences(ours, theirs)).outcome, "not shown")


def lower(ours: Sequence[float], theirs: Sequence[float]) -> Direction:
    """Whether ours are lower; see `higher`."""
    return higher(theirs, ours)


def within(ours: Sequence[float], theirs: Sequence[float], *, margin: float) -> Direction:
    """Whether the two differ by less than `margin`: the 95 % interval of the differences must lie inside it.

    That is two one-sided tests at 2.5 % each. An interval that lies outside on one side fails the claim; any other
    shows nothing. Where no seed differs at all there is no spread to make an interval of: then by the sign test.
    """
    differences = _differences(ours, theirs)
    if not any(differences):
        return sign_test(len(differences), 0)
    interval = difference_interval(differences)
    if interval is None:
        return "not shown"
    if -margin < interval[0] and interval[1] < margin:
        return "holds"
    return "fails" if interval[0] >= margin or interval[1] <= -margin else "not shown"


def sign_test(right: int, wrong: int) -> Direction:
    """Whether seeds do what a claim says, by the exact sign test at 5 % in each direction.

    Five of five decide it, three of three do not; of ten, nine do.

    Args:
        right: seeds in which the claim is right.
        wrong: seeds in which it is not; those in which it is not known are in neither.
    """
    seeds, most = right + wrong, max(right, wrong)
    by_chance = sum(math.comb(seeds, count) for count in range(most, seeds + 1)) / 2**seeds
    if right == wrong or by_chance > 0.05:
        return "not shown"
    return "holds" if right > wrong else "fails"


def sooner(found: ReachComparison) -> Direction:
    """Whether ours reached the level sooner: by the interval of the ratio of steps.

    Where a run has not reached the level there is no interval: then by the sign test of the seeds whose
    order is known.
    """
    if found.ratio is None:
        return sign_test(found.seeds_sooner, found.seeds_later)
    return _OF_OUTCOME.get(found.outcome, "not shown")


def at_most(found: ReachComparison, ratio: float) -> Direction:
    """Whether the ratio of steps is at most `ratio`: by its interval, else by each seed's bounds and the sign test."""
    if found.high is not None and found.low is not None:
        return "holds" if found.high <= ratio else "fails" if found.low > ratio else "not shown"
    if found.at_most is not None and found.at_most <= ratio:
        return sign_test(found.seeds, 0)
    if found.at_least is not None and found.at_least > ratio:
        return sign_test(0, found.seeds)
    return "not shown"


def reached(found: Reach, within: float) -> Direction:
    """Whether a model reaches its level within so many steps: by the interval of the mean steps.

    Where some seed has not come so far, or there is no interval, by the sign test.
    """
    interval = found.interval()
    if interval is None:
        return sign_test(len(found.reached), len(found.missing))
    return "holds" if interval[1] < within else "not shown"


def percent(values: Sequence[float], digits: int = 1) -> str:
    """The mean of shares in per cent, with what of its interval lies between 0 and 100; it says where it was cut."""
    mean = f"{100 * statistics.fmean(values):.{digits}f} %"
    if len(values) == 1:
        return f"{mean} (1 seed)"
    if len(set(values)) == 1:
        return f"{mean} in each of {len(values)} seeds"
    low, high = t_interval(values)
    cuts = " and ".join(end for end, cut in (("0", low < 0), ("100", high > 1)) if cut)
    low, high = (100 * min(1, max(0, end)) for end in (low, high))
    cut = f", cut at {cuts}" if cuts else ""
    return f"{mean} (95 % interval {low:.{digits}f} to {high:.{digits}f}{cut}, {len(values)} seeds)"


def points(ours: Sequence[float], theirs: Sequence[float], digits: int = 1) -> str:
    """The difference of shares in points of a hundred, paired by seed, with its interval.

    Digits are added where an end of the interval would read 0 that is not.
    """
    differences = _differences(ours, theirs)
    if not any(differences) and len(differences) > 1:
        return f"no difference in any of {len(differences)} seeds"
    interval = difference_interval(differences)
    low, high = (100 * end for end in interval or (0, 0))
    while any(end != 0 and round(end, digits) == 0 for end in (low, high)):
        digits += 1
    ends = interval and f"{low:+.{digits}f} to {high:+.{digits}f}"
    return _with_ends(f"{100 * statistics.fmean(differences):+.{digits}f} points", len(differences), ends)


def times(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The ratio of numbers whose logarithms are given, paired by seed: the geometric mean, with its interval."""
    logs = _differences(ours, theirs)
    interval = difference_interval(logs)
    ends = interval and " to ".join(f"{math.exp(end):.2f}" for end in interval)
    return _with_ends(f"times {math.exp(statistics.fmean(logs)):.2f}", len(logs), ends)


def _with_ends(mean: str, seeds: int, ends: str | None) -> str:
    if seeds == 1:
        return f"{mean} (1 seed)"
    if ends is None:
        return f"{mean} in each of {seeds} seeds, which gives no interval"
    return f"{mean} (95 % interval {ends})"


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ours, theirs, strict=True)]
