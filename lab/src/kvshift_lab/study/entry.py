"""The name of a study, its sizes and their cost: everything that a list of studies needs.

This module imports neither torch nor transformers, so that a list of studies is shown quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Cluster = Literal["local", "ray"]
"""The machines on which the runs of a study execute: this one, or a Ray cluster."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The learning rates that are tried for each variant of a comparison.

    Attributes:
        rates: the grid, in ascending order.
        seeds: seeds of the tuning runs, 1000 and up, so that none of them is also reported.
        steps: number of steps of the tuning runs, which are the first steps of a longer run if the rate is constant;
            None for as many as the reported runs have.
    """

    rates: tuple[float, ...]
    seeds: tuple[int, ...] = (1000,)
    steps: int | None = None

    def __post_init__(self) -> None:
        if not self.rates or sorted(set(self.rates)) != list(self.rates):
            raise ValueError(f"rates must be one or more, ascending, got {self.rates}")
        if not self.seeds or min(self.seeds) < 1000:
            raise ValueError(f"seeds must be one or more, each 1000 or above, got {self.seeds}")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One size of a recipe.

    Attributes:
        seeds: default number of seeds.
        cost: time that the preset takes, and the hardware, in words.
        grid: learning rates and seeds with which the rate of each variant is tuned first; None if the rates of the jobs
            are fixed.
        first_seed: the first of the seeds, which are consecutive.
    """

    seeds: int
    cost: str
    grid: Grid | None = None
    first_seed: int = 0

    def seed_numbers(self, count: int | None = None) -> range:
        """Return the seeds of the reported runs: `count` of them, or the default number."""
        return range(self.first_seed, self.first_seed + (count or self.seeds))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe in the list.

    Attributes:
        name: name of the recipe, as typed on the command line, and of its folder: "fig01a".
        title: title in one line.
        presets: presets by name: "smoke" (seconds), "laptop" (minutes or hours on two cores), "paper" (a GPU) etc.
        study: name of the study whose runs the recipe shares: all recipes of a study use the same runs of an arm, which
            are run once. None if the recipe shares no runs.
    """

    name: str
    title: str
    presets: Mapping[str, Preset]
    study: str | None = None

    @property
    def runs(self) -> str:
        """The name of the folder of its runs, and of the folder of their records."""
        return self.study or self.name
