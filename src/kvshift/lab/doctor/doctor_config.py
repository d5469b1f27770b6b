"""Options of `kvshift doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvshift.lab.errors import require

__all__ = ["DoctorConfig"]


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Where to look, and what to print.

    Exit code: 0 if nothing is wrong, 1 if something is, 2 for bad input.
    """

    device: str = "auto"
    """cpu, cuda, cuda:1 ... auto: the CPU and every CUDA device."""
    json: bool = False
    """Print JSON instead of text."""
    output: Path | None = None
    """Write the JSON to this file, replacing an existing file."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        if self.output is not None:
            fits = self.output.parent.is_dir() and not self.output.is_dir()
            require(fits, "output", str(self.output), "a file in a folder that exists")
