"""Options of `kvshift retrofit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift_lab.core.errors import require, require_new
from kvshift_lab.variants.model_config import DType


@dataclass(frozen=True, kw_only=True)
class RetrofitOptions:
    """Options of `kvshift retrofit`: the model, the shift to add, and the output folder."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A model folder, a run folder, or a model on the hub, with weights in safetensors format."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder of the new model. If it exists, it must be empty."""
    shift_targets: tuple[Literal["q", "k", "v"], ...] = ("k", "v")
    """Which of queries, keys and values to shift."""
    shift_window: int = 2
    """Number of tokens to mix, including the current one."""
    shift_constraint: Literal["free", "clamp"] = "free"
    """Constraint on the shift coefficients. free: none. clamp: within [0, 1]."""
    dtype: DType = "auto"
    """dtype of the weights. auto: as saved. The shift coefficients are always float32."""

    def check_paths(self) -> None:
        """Raise a LabError if the output folder exists and is not empty, or there is no such model."""
        from kvshift_lab.run.model_files import require_models  # the hub's package

        require_new(self.out)
        require_models(self.model)

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        require(bool(self.shift_targets), "shift_targets", self.shift_targets, "one or more of q, k, v")
        require(self.shift_window >= 2, "shift_window", self.shift_window, "2 or more")
