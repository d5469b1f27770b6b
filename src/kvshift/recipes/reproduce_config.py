"""What `kvshift reproduce` is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from kvshift.lab.errors import LabError

__all__ = ["Cluster", "ReproduceConfig"]

Cluster = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Which figure or table, how large, and where. Without a recipe: list them, with what is done and what they cost.

    The same command, given again, resumes where it was stopped.
    """

    recipe: tyro.conf.Positional[str | None] = None
    """Such as fig01a."""
    preset: str = "laptop"
    """smoke: seconds. laptop: minutes or hours on two cores. paper: the paper's own sizes, for a GPU."""
    seeds: int | None = None
    """How many seeds, 0 and up; None: the preset's."""
    jobs: int | None = None
    """Runs at a time; None: one for each core, or one where there is a GPU. With one, it runs in this very process."""
    cluster: Cluster = "local"
    """ray: over the Ray cluster that RAY_ADDRESS names, or one started here; OUT must be seen by all its machines."""
    out: Path = Path("runs/reproduce")
    """Folder of all recipes."""
    results: Path | None = None
    """Also keep the records here, as RESULTS/RECIPE/PRESET.jsonl, which `docs/results.md` is made from; until all runs
    are finished, as PRESET.partial.jsonl. A run whose record is here is not run again."""

    def check(self) -> None:
        """Raise a LabError that names the field, its value, and what it may be."""
        for name in ("seeds", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LabError(f"{name} must be 1 or more, got {value}")
