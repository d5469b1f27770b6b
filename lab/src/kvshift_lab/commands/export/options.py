"""Options of `kvshift export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift_lab.core.errors import LabError, require_new
from kvshift_lab.variants.model_config import DType


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The model to export, the format, and the folder of the result.

    By default the result is two programs with their weights: "prefill" for prompts and "decode" for the tokens
    after them. With --format mlx it is a folder for mlx-lm; with --remote-code, a model folder that AutoModel loads
    with trust_remote_code=True wherever kvshift is installed. docs/export.md describes all three.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a model on the hub, with weights in safetensors format."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder of the result; it must not exist, or be empty."""
    format: Literal["onnx", "pt2", "mlx"] = "onnx"
    """onnx: programs for ONNX Runtime. pt2: programs for `torch.export.load`. mlx: a model folder for mlx-lm."""
    remote_code: bool = False
    """Write a model folder for the hub, with a file that imports the classes from kvshift, instead of programs."""
    dtype: DType = "auto"
    """dtype of the weights. auto: as saved. The shift coefficients are always float32."""

    def check_paths(self) -> None:
        """Raise a LabError if `out` exists and is not an empty folder, or there is no such model."""
        from kvshift_lab.run.model_files import require_models  # the hub's package

        require_new(self.out)
        require_models(self.model)

    def check(self) -> None:
        """Raise a LabError that names the invalid option, its value and the values that are allowed."""
        if self.remote_code and self.format != "onnx":
            raise LabError(f"format must be left out with remote_code, got {self.format!r}")
