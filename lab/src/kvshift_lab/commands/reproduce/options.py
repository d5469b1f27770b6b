"""Options of `kvshift reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvshift_lab.core.errors import LabError
from kvshift_lab.study.entry import Cluster


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """The figure or table to reproduce, its size, and the folder of the results. Without a recipe, all are listed.

    Running the same command again resumes it.
    """

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]")] = None
    """Name of the figure or table, such as fig01a. None: list all."""
    preset: str = "laptop"
    """Size of the runs. smoke: seconds. laptop: minutes or hours on two cores. paper: the paper's sizes, for a GPU."""
    seeds: int | None = None
    """Number of seeds; they are 0, 1, 2, ... None: the preset's number."""
    jobs: int | None = None
    """Number of parallel runs. None: one per core, or 1 if there is a GPU. With 1, runs execute in the command's own
    process."""
    bundled_text: bool = False
    """Read Tiny Shakespeare, which is bundled, where the recipe reads a folder of text (KVSHIFT_SHARED_DATA). It is far
    smaller, is read many times, and the report says so."""
    cluster: Cluster = "local"
    """Where runs execute. ray: on the Ray cluster at RAY_ADDRESS, or a new local one; all its machines must see
    `out`."""
    out: Path = Path("runs/reproduce")
    """Folder for the results of all recipes."""
    results: Path | None = None
    """Also save the records in this folder, as RECIPE/PRESET.jsonl (PRESET.partial.jsonl until all runs are finished),
    from which docs/results.md is made. Runs that have a record there are skipped."""

    def check(self) -> None:
        """Raise a LabError if a field is invalid; it names the field, its value and the allowed values."""
        for name in ("seeds", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LabError(f"{name} must be 1 or more, got {value}")
