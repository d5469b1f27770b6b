"""What a study is called, which sizes it has and what they cost: all that a list of studies needs.

Imports nothing that takes time, so that such a list needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Cluster = Literal["local", "ray"]
"""Where the runs of a study execute."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The learning rates that every variant of a comparison is given.

    Attributes:
        rates: the grid, ascending.
        seeds: of the runs that choose among them, 1000 and up: far from those that are reported, which begin at 0.
        steps: of the runs that choose, which are the first of a longer run where the rate is constant; None: as many
            as those that are reported have.
    """

    rates: tuple[float, ...]
    seeds: tuple[int, ...]
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
        seeds: how many by default: 0 ... seeds - 1.
        cost: what it takes, in words: time, and on what.
        grid: learning rates that every variant is given before, and the seeds that choose each one's own; None: the
            jobs' own rates.
    """

    seeds: int
    cost: str
    grid: Grid | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe in the list.

    Attributes:
        name: as typed, and that of its folder: "fig01a".
        title: one line.
        presets: by name: "smoke" (seconds), "laptop" (minutes or hours on two cores), "paper" (a GPU), and others.
        study: whose runs it shares: runs of one arm are the same runs in all recipes of a study, and are run once;
            None: its runs are its own.
    """

    name: str
    title: str
    presets: Mapping[str, Preset]
    study: str | None = None

    @property
    def runs(self) -> str:
        """The name of the folder, and of the file of records, that its runs are in."""
        return self.study or self.name
