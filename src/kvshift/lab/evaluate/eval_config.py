"""What `kvshift eval` is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift.lab.errors import LabError, require
from kvshift.lab.training.train_config import DType

__all__ = ["EvalConfig"]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Which models, on which text, and how much of it a model sees at once."""

    model: Annotated[str, tyro.conf.Positional]
    """A run folder, a model folder, or a model on the hub."""
    texts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Files, folders, quoted globs or a hub dataset: whatever --data.corpus of kvshift train takes. Together they are
    one text."""
    against: tuple[str, ...] = ()
    """More models, each compared with the first on the same text."""
    packing: Literal["documents", "concat"] = "documents"
    """documents: each starts with nothing before it. concat: one sequence, with the end-of-text token between them."""
    window: int | None = None
    """Tokens that a model sees at once. None: as many as all the models are made for, 2048 at most."""
    stride: int | None = None
    """Tokens from the start of a window to that of the next; every token is scored in the first window that holds it.
    None: window - 1, the fastest that scores every token. Smaller: more context for each. window: as rows of training,
    where the first token of each is not scored."""
    begin: Literal["auto", "yes", "no"] = "auto"
    """Put the token that begins texts (bos, else eos) before each sequence, so that its first token is scored too;
    auto: where the tokenizer does so itself."""
    text_column: str = "text"
    """Column that holds the text, in .jsonl and .parquet files and hub datasets."""
    hub_config: str | None = None
    """Configuration of the hub dataset."""
    split: str = "train"
    """Split of the hub dataset."""
    streaming: bool = False
    """Read a hub dataset while it is scored, instead of downloading it before. (Files are always read so.)"""
    batch_size: int = 8
    """Windows scored at once."""
    output: Path | None = None
    """File for the numbers of the table as JSON; replaced where it is there."""
    dtype: DType = "auto"
    """Of the weights; auto: as they were saved."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps ...; auto: the accelerator where there is one."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        if not self.texts:
            raise LabError(
                "texts must name what to evaluate on, behind the model: kvshift eval RUN_OR_MODEL FILE ... "
                "--against MODEL ..."
            )
        require(self.window is None or self.window >= 2, "window", self.window, "2 or more, or None")
        require(self.stride is None or self.stride >= 1, "stride", self.stride, "1 or more, or None")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "1 or more")
        if self.output is not None:
            require(
                self.output.parent.is_dir() and not self.output.is_dir(),
                "output",
                str(self.output),
                "a file in a folder that exists",
            )
