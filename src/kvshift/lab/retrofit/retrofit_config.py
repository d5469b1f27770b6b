"""Options of `kvshift retrofit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift.lab.core.errors import require, require_new
from kvshift.lab.variants.model_config import DType


@dataclass(frozen=True, kw_only=True)
class RetrofitOptions:
    """The model, the shift to add, and the folder of the result."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A model folder, a run folder, or a model on the hub, with weights in safetensors format."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder of the new model; it must not exist, or be empty."""
    shift_targets: tuple[Literal["q", "k", "v"], ...] = ("k", "v")
    """Which of queries, keys and values to shift."""
    shift_window: int = 2
    """Number of tokens that are mixed, the current one included."""
    shift_constraint: Literal["free", "clamp"] = "free"
    """free: any numbers. clamp: within [0, 1]."""
    dtype: DType = "auto"
    """dtype of the weights. auto: as saved. The shift coefficients are always float32."""

    def check_paths(self) -> None:
        """Raise a LabError where something stands in the place of the new folder."""
        require_new(self.out)

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        require(bool(self.shift_targets), "shift_targets", self.shift_targets, "one or more of q, k, v")
        require(self.shift_window >= 2, "shift_window", self.shift_window, "2 or more")
