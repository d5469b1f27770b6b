"""What `kvshift analyze` is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvshift.lab.errors import require, require_unicode
from kvshift.lab.training.train_config import DType

__all__ = ["AnalyzeConfig", "RepeatConfig"]


@dataclass(frozen=True, kw_only=True)
class RepeatConfig:
    """Sequences of different random tokens that come twice."""

    length: int | None = None
    """Tokens before the repeat. None: 64, or fewer where the model has fewer tokens or positions."""
    rows: int = 32
    """Sequences to average over."""
    batch_size: int = 4
    """Sequences at once; the attention of all layers is held for them."""
    seed: int = 0
    """Of the tokens."""
    lowest_token: int | None = None
    """Tokens are drawn from this number on: for vocabularies that begin with numbers the model never saw. None: 0."""
    highest_token: int | None = None
    """And up to this one. None: the last of the vocabulary."""
    begin: int | None = None
    """Token before each sequence that is not repeated, such as the one that begins texts. None: none."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        for name in ("rows", "batch_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(RepeatConfig):
    """Which model to analyze, and on which sequences."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run folder, of text or of a task, or the folder of a model."""
    out: Path | None = None
    """Folder for what is found. None: RUN/analysis."""
    lowest_token: int | None = None
    """Sequences are made of tokens from this number on. None: from the lowest that the run's task uses, or 0."""
    maps: int = 1
    """Heads whose attention is drawn, for each score those with the highest."""
    text: str | None = None
    """Draw their attention on this text; the model needs a tokenizer. None: on the first sequence of random tokens."""
    dtype: DType = "auto"
    """Of the weights; auto: as they were saved."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps ...; auto: the accelerator where there is one."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        super().check()
        require(self.maps >= 1, "maps", self.maps, "1 or more")
        require_unicode(self.text or "", "text")
