"""Options of `kvshift analyze`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvshift.lab.core.errors import require, require_unicode
from kvshift.lab.training.train_config import DType


@dataclass(frozen=True, kw_only=True)
class RepeatConfig:
    """Sequences of distinct random tokens, each repeated once."""

    length: int | None = None
    """Tokens before the repeat. None: 64, or fewer if the vocabulary or the context is smaller."""
    rows: int = 32
    """Number of sequences to average over."""
    batch_size: int = 4
    """Sequences per batch; the attention weights of all layers are in memory for a batch."""
    seed: int = 0
    """Random seed of the tokens."""
    lowest_token: int | None = None
    """Smallest token id in the sequences, for vocabularies that begin with unused ids. None: 0."""
    highest_token: int | None = None
    """Largest token id in the sequences. None: the last of the vocabulary."""
    begin: int | None = None
    """Token id to put before each sequence and not repeat, such as the beginning-of-text token. None: no token."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        for name in ("rows", "batch_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(RepeatConfig):
    """The model to analyze, and the sequences to analyze it on."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder (of a text or a task) or a model folder."""
    out: Path | None = None
    """Folder for the results. None: RUN/analysis."""
    lowest_token: int | None = None
    """Smallest token id in the sequences. None: the smallest that the task of the run uses, or 0."""
    maps: int = 1
    """Number of heads with the highest score whose attention is drawn, for each kind of score."""
    text: str | None = None
    """Draw attention on this text; the model needs a tokenizer. None: on the first sequence of random tokens."""
    dtype: DType = "auto"
    """dtype of the weights. auto: as saved."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps ... auto: the accelerator if there is one."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        super().check()
        require(self.maps >= 1, "maps", self.maps, "1 or more")
        require_unicode(self.text or "", "text")
