"""What `kvshift retrofit` is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift.lab.errors import require
from kvshift.lab.training.train_config import DType

__all__ = ["RetrofitOptions"]


@dataclass(frozen=True, kw_only=True)
class RetrofitOptions:
    """Which model gets a shift, which one, and where the result goes."""

    model: Annotated[str, tyro.conf.Positional]
    """A model folder, a run folder, or a model on the hub; its weights as safetensors."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder of the new model, which must not be there, or be empty."""
    shift_targets: tuple[Literal["q", "k", "v"], ...] = ("k", "v")
    """What the layers shift."""
    shift_window: int = 2
    """Tokens mixed, the current one included."""
    shift_constraint: Literal["free", "clamp"] = "free"
    """free: any numbers. clamp: within [0, 1]."""
    dtype: DType = "auto"
    """Of the weights; auto: as they were saved. Coefficients are float32 in any case."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        require(bool(self.shift_targets), "shift_targets", self.shift_targets, "one or more of q, k, v")
        require(self.shift_window >= 2, "shift_window", self.shift_window, "2 or more")
