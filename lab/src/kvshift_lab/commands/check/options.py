"""Options of `kvshift check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift_lab.core.errors import require


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """The model to check, and options of the check.

    Exit code: 0 if nothing is wrong, 1 if something is, 2 for bad input.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a model on the hub: any causal language model of transformers."""
    properties: tuple[str, ...] = ()
    """Properties to test, by their names in the table, such as "causality" "cache: every split". With no value: all."""
    length: int = 24
    """Length of the longest sequences in tokens, 12 or more. Longer windows and chunks are not covered."""
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    """dtype of the check. auto: as saved, but float32 for a model in half precision, where rounding hides errors."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps ... auto: the accelerator if there is one."""
    attn_implementation: str | None = None
    """eager, sdpa, flex_attention ... None: the model's default."""
    trust_remote_code: bool = False
    """Run the code in the model's folder or repository."""
    seed: int = 0
    """Random seed of the tokens."""
    json: bool = False
    """Print JSON instead of the table."""
    output: Path | None = None
    """Write the JSON to this file, replacing an existing file."""

    def check_paths(self) -> None:
        """Raise a LabError if there is no such model."""
        from kvshift_lab.run.model_files import require_models  # the hub's package

        require_models(self.model)

    def check(self) -> None:
        """Raise a LabError that names a wrong option, its value and the allowed values."""
        require(self.length >= 12, "length", self.length, "12 or more")
        require(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")
        if self.output is not None:
            fits = self.output.parent.is_dir() and not self.output.is_dir()
            require(fits, "output", str(self.output), "a file in a folder that exists")
