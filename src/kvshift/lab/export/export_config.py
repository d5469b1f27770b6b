"""What `kvshift export` is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift.lab.errors import LabError
from kvshift.lab.training.train_config import DType

__all__ = ["ExportOptions"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Which model leaves the package, in what form, and where the result goes.

    By default it becomes two programs, "prefill" for prompts and "decode" for the tokens after them, which need neither
    this package nor the weights beside them. With --remote-code it stays a model of transformers, in a folder that
    brings its own code. docs/export.md describes both.
    """

    model: Annotated[str, tyro.conf.Positional]
    """A run folder, a model folder, or a model on the hub; its weights as safetensors."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder of the result, which must not be there, or be empty."""
    format: Literal["onnx", "pt2"] = "onnx"
    """onnx: for ONNX Runtime. pt2: for `torch.export.load`."""
    remote_code: bool = False
    """Write a model folder with the one Python file that it needs where kvshift is not installed."""
    dtype: DType = "auto"
    """Of the weights; auto: as they were saved. Coefficients are float32 in any case."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        if self.remote_code and self.format != "onnx":
            raise LabError(f"format is of programs: leave it out with remote_code, got {self.format!r}")
