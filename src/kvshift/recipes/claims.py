"""A claim of the paper beside what was found, and the words that measured numbers allow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvshift.lab.analysis.learning import ReachComparison
from kvshift.lab.analysis.statistics import t_interval

__all__ = ["Claim", "Direction", "higher", "in_every_seed", "no_difference", "percent", "points", "sooner"]

Direction = Literal["holds", "fails", "not shown"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the paper beside what was found.

    Attributes:
        statement: the claim.
        paper: the paper's number, or its words.
        ours: our numbers, with their interval over seeds.
        direction: "holds" and "fails" are said where our numbers decide the matter; "not shown" where they do not.
        size: how large ours is beside the paper's, or why the two cannot be compared.
        own: whether the question is ours: the paper does not claim it.
    """

    statement: str
    paper: str
    ours: str
    direction: Direction
    size: str
    own: bool = False


def higher(ours: Sequence[float], theirs: Sequence[float]) -> Direction:
    """Whether ours are higher, paired by seed: by the 95 % t-interval of the differences, which one seed has not."""
    interval = _interval(ours, theirs)
    if interval is None or interval[0] <= 0 <= interval[1]:
        return "not shown"
    return "holds" if interval[0] > 0 else "fails"


def no_difference(ours: Sequence[float], theirs: Sequence[float], *, margin: float) -> Direction:
    """Whether the two are the same to within `margin`: the interval of the differences must lie inside it.

    One that leaves 0 out and goes beyond the margin fails the claim; any other shows nothing.
    """
    interval = _interval(ours, theirs)
    if interval is None:
        return "not shown"
    if -margin <= interval[0] and interval[1] <= margin:
        return "holds"
    return "fails" if interval[0] > 0 or interval[1] < 0 else "not shown"


def in_every_seed(right: int, seeds: int) -> Direction:
    """Whether seeds do what a claim says, by the exact sign test at 5 %: five of five decide it, three of three do not.

    Args:
        right: seeds in which the claim is right.
        seeds: all of them.
    """
    if 0.5**seeds > 0.05 or right not in (0, seeds):
        return "not shown"
    return "holds" if right else "fails"


def sooner(found: ReachComparison) -> Direction:
    """Whether ours reached the level sooner: by the interval of the ratio of steps.

    Where a run has not reached the level there is no interval: then by the sign test, `in_every_seed`.
    """
    if found.outcome in ("sooner in every seed", "later in every seed"):
        return in_every_seed(found.seeds if found.outcome == "sooner in every seed" else 0, found.seeds)
    if found.outcome == "sooner":
        return "holds"
    return "fails" if found.outcome == "later" else "not shown"


def percent(values: Sequence[float], digits: int = 1) -> str:
    """The mean of shares in per cent, with what of its interval lies between 0 and 100."""
    mean = 100 * statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.{digits}f} % (1 seed)"
    low, high = (100 * min(1, max(0, end)) for end in t_interval(values))
    return f"{mean:.{digits}f} % (95 % interval {low:.{digits}f} to {high:.{digits}f}, {len(values)} seeds)"


def points(ours: Sequence[float], theirs: Sequence[float], digits: int = 1) -> str:
    """The difference of shares in points of a hundred, paired by seed, with its interval."""
    mean = 100 * statistics.fmean(one - other for one, other in zip(ours, theirs, strict=True))
    interval = _interval(ours, theirs)
    if interval is None:
        return f"{mean:+.{digits}f} points (1 seed)"
    low, high = (100 * end for end in interval)
    return f"{mean:+.{digits}f} points (95 % interval {low:+.{digits}f} to {high:+.{digits}f})"


def _interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float] | None:
    """Of the mean difference; None for one seed. Equal differences have an interval without width."""
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    return None if len(differences) == 1 else t_interval(differences)
