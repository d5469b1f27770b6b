"""Options of `kvshift analyze`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvshift_lab.core.errors import require, require_unicode
from kvshift_lab.run.repeat_config import RepeatConfig
from kvshift_lab.variants.model_config import DType


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

    def check_paths(self) -> None:
        """Raise a LabError if there is no such model."""
        from kvshift_lab.run.model_files import require_models  # the hub's package

        require_models(str(self.run))

    def check(self) -> None:
        """Raise a LabError that names the invalid option, its value and the values that are allowed."""
        super().check()
        require(self.maps >= 1, "maps", self.maps, "1 or more")
        require_unicode(self.text or "", "text")
