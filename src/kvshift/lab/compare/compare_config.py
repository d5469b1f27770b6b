"""What `kvshift compare` is told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from kvshift.lab.errors import LabError, require_unicode
from kvshift.lab.training.train_config import TrainConfig

__all__ = ["CompareConfig"]


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """A comparison. The same command, given again, resumes where it was stopped; finished runs are kept."""

    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(
        default_factory=lambda: TrainConfig(out=Path("runs/compare"), steps=400)
    )
    """What both twins share. `out` is the folder of the comparison, `seed` the first seed, and `model.shift_*` what
    the one has and the other, vanilla, has not."""
    seeds: int = 1
    """Pairs of runs, with seeds `seed`, `seed` + 1, ...; 3 or more say what seeds change (95 % interval)."""
    step_time_seconds: float = 15.0
    """Seconds spent at the end on measuring the time of a step of both twins, alternately; 0: not measured."""
    prompt: str | None = None
    """Text that the samples continue; None: the first 16 tokens of the validation text."""
    sample_tokens: int = 120
    """Tokens of each sample; 0: no samples."""
    temperature: float = 0.8
    """Of the samples: logits are divided by it; 0: always the likeliest token."""

    def check(self) -> None:
        """Raise a LabError that names the field, its value, and what it may be."""
        if self.seeds < 1:
            raise LabError(f"seeds must be 1 or more, got {self.seeds}")
        for name in ("step_time_seconds", "sample_tokens", "temperature"):
            if not getattr(self, name) >= 0:
                raise LabError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.prompt == "":
            raise LabError("prompt must not be empty")
        require_unicode(self.prompt or "", "prompt")
        if self.train.model.shift_targets == ():
            raise LabError("model.shift_targets must name at least one of q, k, v: without, both models are vanilla")
        for name in ("extend", "overwrite"):
            if getattr(self.train, name):
                raise LabError(f"{name} is for kvshift train; for another comparison choose another folder for out")
        if "RANK" in os.environ:
            raise LabError("compare starts its own processes, one after the other: start it without torchrun")
        self.train.check()
