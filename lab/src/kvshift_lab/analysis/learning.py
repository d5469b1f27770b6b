"""How soon models learn: the steps at which seeds reach a level of accuracy, and the ratio of steps of two models.

The steps of several seeds are averaged as logarithms: they are positive, they are compared by ratios ("half the
steps"), and seeds differ by factors; a t-interval of the plain steps would often begin below zero. So the mean is the
geometric mean, and a difference of means of logarithms is the logarithm of a ratio.

A run that never reaches the level has no step to average. It is neither left out of the mean nor counted with its last
step. Instead there is no mean, and the text states how many seeds are missing, and within how many steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvshift_lab.core.statistics import first_reached, t_interval


def steps_to(steps: Sequence[float], accuracy: Sequence[float], level: float) -> float | None:
    """Return the step at which an accuracy first reaches `level`; None if it never does.

    The step is interpolated linearly between evaluations, so it is exact to within the steps between two of them. If
    the first evaluation is already at the level, its step is returned, though the level may have been reached earlier.
    """
    _check_level(level)
    if len(steps) != len(accuracy):
        raise ValueError(f"accuracy must have one value for each of {len(steps)} steps, got {len(accuracy)}")
    if not len(steps):
        raise ValueError("steps must hold at least one evaluation, got none")
    if not all(0 <= value <= 1 for value in accuracy):
        raise ValueError(f"accuracy must lie between 0 and 1, got {list(accuracy)}")
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ValueError(f"steps must increase, got {list(steps)}")
    return first_reached(steps, [-value for value in accuracy], -level)


@dataclass(frozen=True, kw_only=True)
class StepsToLevel:
    """The steps at which the seeds of one model reached a level of accuracy.

    Attributes:
        level: The level of accuracy, such as 0.99.
        steps: For each seed, the step at which the level was reached, or None.
        last_steps: For each seed, the step of the last evaluation, the limit for seeds that did not reach the level.
    """

    level: float
    steps: Mapping[int, float | None]
    last_steps: Mapping[int, float]

    def __post_init__(self) -> None:
        _check_level(self.level)
        if not self.steps:
            raise ValueError("steps must hold at least one seed, got none")
        if self.steps.keys() != self.last_steps.keys():
            raise ValueError(
                f"steps and last_steps must have the same seeds, got {list(self.steps)}, {list(self.last_steps)}"
            )
        for seed, step in self.steps.items():
            if step is not None and not 0 < step <= self.last_steps[seed]:
                # Step 0 is before training: nothing was learned, and a ratio to 0 is undefined.
                raise ValueError(
                    f"seed {seed}: steps must be above 0 and at most {self.last_steps[seed]:g}, got {step:g}"
                )

    @property
    def reached(self) -> list[float]:
        """Steps of the seeds that reached the level, in the order of the seeds."""
        return [step for step in self.steps.values() if step is not None]

    @property
    def missing(self) -> list[int]:
        """Seeds that did not reach the level."""
        return [seed for seed, step in self.steps.items() if step is None]

    @property
    def mean(self) -> float | None:
        """Geometric mean over seeds; None if a seed did not reach the level."""
        return None if self.missing else statistics.geometric_mean(self.reached)

    def interval(self) -> tuple[float, float] | None:
        """Return Student's 95 % interval of the mean of log(steps), as steps; None for one, equal or missing seeds."""
        if self.missing or len(set(self.reached)) == 1:
            return None
        low, high = t_interval([math.log(step) for step in self.reached])
        return math.exp(low), math.exp(high)

    @property
    def text(self) -> str:
        """Description of the mean with its interval, or of how many seeds did not reach the level."""
        seeds = _seeds(len(self.steps))
        level = f"{100 * self.level:g} %"
        if self.missing:
            limits = sorted({self.last_steps[seed] for seed in self.missing})
            limit = f"{limits[0]:,g}" if len(limits) == 1 else f"{limits[0]:,g} to {limits[-1]:,g}"
            text = f"{level} not reached within {limit} steps by {len(self.missing)} of {seeds}"
            if self.reached:
                text += f"; by the rest after {', '.join(f'{step:,.0f}' for step in sorted(self.reached))}"
            return text
        interval = self.interval()
        spread = "" if interval is None else f"95 % interval {interval[0]:,.0f} to {interval[1]:,.0f}, "
        return f"{level} after {self.mean:,.0f} steps ({spread}{seeds})"


def steps_to_level(curves: Mapping[int, tuple[Sequence[float], Sequence[float]]], level: float) -> StepsToLevel:
    """Create the record of a model from its curves: for each seed, the steps of evaluations and the accuracy at each.

    Evaluations before training (step 0) are allowed if they are below the level.
    """
    return StepsToLevel(
        level=level,
        steps={seed: steps_to(steps, accuracy, level) for seed, (steps, accuracy) in curves.items()},
        last_steps={seed: float(steps[-1]) for seed, (steps, _) in curves.items()},
    )


@dataclass(frozen=True, kw_only=True)
class StepsComparison:
    """The ratio of our model's steps to theirs, paired by seed.

    Attributes:
        outcome: "sooner" or "later" if the 95 % interval of the ratio excludes 1, for our model. If a run did not reach
            the level, there is no interval: "sooner in every seed" and "later in every seed" describe only these
            seeds, and all other cases are "undecided".
        text: The outcome in words, with its numbers.
        ratio: Geometric mean of ours / theirs; None if a run of either model did not reach the level.
        low, high: Ends of the interval of the ratio; None if there is none.
        at_least, at_most: Bounds on the ratios of all seeds. A run that did not reach the level needs more than its
            last step, which bounds its ratio on one side. None if there is no bound.
        seeds: Number of pairs.
        seeds_sooner, seeds_later: Numbers of pairs in which our model is known to be sooner, or later.
    """

    outcome: Literal[
        "sooner", "later", "no difference shown", "sooner in every seed", "later in every seed", "undecided"
    ] = "undecided"
    text: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    at_least: float | None
    at_most: float | None
    seeds: int
    seeds_sooner: int
    seeds_later: int


def compare_steps(
    ours: StepsToLevel, theirs: StepsToLevel, *, names: tuple[str, str] = ("KV-shift", "vanilla")
) -> StepsComparison:
    """Compare the steps of two models with the same seeds by their ratio, with the 95 % interval of its mean logarithm.

    Pairing by seed removes variation that both runs share, such as the order of the data.
    """
    if ours.level != theirs.level:
        raise ValueError(f"ours and theirs must have the same level, got {ours.level:g} and {theirs.level:g}")
    if ours.steps.keys() != theirs.steps.keys():
        raise ValueError(
            f"ours and theirs must have the same seeds, got {sorted(ours.steps)} and {sorted(theirs.steps)}"
        )
    most = [_over(ours.steps[seed], theirs.steps[seed] or theirs.last_steps[seed]) for seed in ours.steps]
    least = [_over(ours.steps[seed] or ours.last_steps[seed], theirs.steps[seed]) for seed in ours.steps]
    at_most = None if None in most else max(value for value in most if value is not None)
    at_least = None if None in least else min(value for value in least if value is not None)
    found = StepsComparison(
        at_least=at_least,
        at_most=at_most,
        seeds=len(ours.steps),
        seeds_sooner=sum(value is not None and value < 1 for value in most),
        seeds_later=sum(value is not None and value > 1 for value in least),
    )
    if ours.missing or theirs.missing:
        return _censored(found, ours, theirs, names)
    return _complete(found, [value for value in most if value is not None], names)


def _over(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours / theirs


def _censored(
    found: StepsComparison, ours: StepsToLevel, theirs: StepsToLevel, names: tuple[str, str]
) -> StepsComparison:
    both = f"{names[0]}: {ours.text}; {names[1]}: {theirs.text}"
    if found.at_most is not None and found.at_most < 1:
        bound = f"{names[0]} needs at most {found.at_most:.3g} of the steps in each of {_seeds(found.seeds)}"
        return replace(found, outcome="sooner in every seed", text=f"{bound}, no interval ({both})")
    if found.at_least is not None and found.at_least > 1:
        bound = f"{names[0]} needs at least {found.at_least:.3g} times the steps in each of {_seeds(found.seeds)}"
        return replace(found, outcome="later in every seed", text=f"{bound}, no interval ({both})")
    counts = f"known to be sooner in {found.seeds_sooner} of {_seeds(found.seeds)}, later in {found.seeds_later}"
    return replace(found, text=f"{counts}, no interval ({both})")


def _complete(found: StepsComparison, ratios: list[float], names: tuple[str, str]) -> StepsComparison:
    ratio = statistics.geometric_mean(ratios)
    needs = f"{names[0]} needs {ratio:.3g} of the steps of {names[1]}"
    if len(ratios) == 1:
        text = f"{needs} in this one pair of runs; how much another seed changes that is unknown"
        return replace(found, text=text, ratio=ratio)
    if len(set(ratios)) == 1:
        text = f"{needs} in each of {_seeds(found.seeds)}; equal to the last bit, they give no interval"
        return replace(found, text=text, ratio=ratio)
    low, high = (math.exp(end) for end in t_interval([math.log(value) for value in ratios]))
    interval = f"95 % interval {low:.3g} to {high:.3g}, {_seeds(found.seeds)}"
    found = replace(found, ratio=ratio, low=low, high=high)
    if low <= 1 <= high:
        return replace(found, outcome="no difference shown", text=f"no difference shown: {needs} ({interval})")
    return replace(found, outcome="sooner" if high < 1 else "later", text=f"{needs} ({interval})")


def _check_level(level: float) -> None:
    if not 0 < level <= 1:
        raise ValueError(f"level must be above 0 and at most 1, got {level}")


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"
