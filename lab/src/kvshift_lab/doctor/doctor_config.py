"""Options of `kvshift doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """The devices to examine, and the format of the report.

    Exit code: 0 if nothing is wrong, 1 if something is, 2 for bad input.
    """

    device: str = "auto"
    """cpu, cuda, cuda:1 ... auto: the CPU and every CUDA device."""
    json: bool = False
    """Print JSON instead of text."""
