"""What `kvshift check` is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift.lab.errors import require

__all__ = ["CheckConfig"]


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Which model, and in what way.

    Exit code: 0 where nothing is wrong, 1 where something is, 2 for bad input.
    """

    model: Annotated[str, tyro.conf.Positional]
    """A run folder, a model folder, or a model on the hub: any causal language model of transformers."""
    properties: tuple[str, ...] = ()
    """Only these, by their names in the table, such as "causality" "cache: every split"; none given: all."""
    length: int = 24
    """Tokens of the longest sequences, 12 or more. Windows and chunks that are longer are not reached."""
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    """What to check in; auto: as saved, but a model of half precision in float32, where rounding hides less."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps ...; auto: the accelerator where there is one."""
    attn_implementation: str | None = None
    """eager, sdpa, flex_attention ...; None: the model's default."""
    trust_remote_code: bool = False
    """Run the code that comes with the model."""
    seed: int = 0
    """Of the tokens, which are drawn at random."""
    json: bool = False
    """Print JSON in place of the table."""
    output: Path | None = None
    """File for the same JSON; replaced where it is there."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        require(self.length >= 12, "length", self.length, "12 or more")
        require(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")
        if self.output is not None:
            fits = self.output.parent.is_dir() and not self.output.is_dir()
            require(fits, "output", str(self.output), "a file in a folder that exists")
