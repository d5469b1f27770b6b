"""Options of `kvshift eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift_lab.core.errors import LabError, require
from kvshift_lab.variants.model_config import DType


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Models, and one of two measures: loss on a text (MODEL FILE ...) or benchmarks (MODEL --tasks paper)."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a model on the hub."""
    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FILE ...]")] = ()
    """Text to evaluate on: files, folders, quoted globs or a hub dataset, as for --data.corpus of kvshift train.
    Several are read as one text. FILE and --tasks cannot be combined."""
    against: tuple[str, ...] = ()
    """More models; each is compared with the first on the same text or questions."""
    tasks: tuple[str, ...] = ()
    """Benchmarks: paper (the eight of its Table 2), table14 (MMLU in three formats), or any of
    lambada, winogrande, hellaswag, arc_easy, arc_easy_text, arc_challenge, arc_challenge_text,
    cmmlu, cmmlu_zero, mmlu, mmlu_zero, mmlu_cloze, math."""
    data: str | None = None
    """With tasks: folder of the benchmarks' files. None: the folder in the environment variable KVSHIFT_SHARED_DATA."""
    limit: int | None = None
    """With tasks: only the first N questions of each task. None: all."""
    packing: Literal["documents", "concat"] = "documents"
    """documents: score each document separately. concat: score one sequence, with the end-of-text token between
    documents."""
    window: int | None = None
    """Tokens per window. None: the shortest context of the models, at most 2048."""
    stride: int | None = None
    """Tokens between the starts of consecutive windows; a token is scored in the first window that contains it. None:
    window - 1, the fastest value that scores every token. A smaller stride gives more context. With stride = window,
    the first token of each window is not scored, as in training."""
    begin: Literal["auto", "yes", "no"] = "auto"
    """Put the beginning-of-text token (bos, or eos if there is none) before each sequence, so that the first token is
    scored too. auto: if the tokenizer does so by default."""
    text_column: str = "text"
    """Column that holds the text, in .jsonl, .json and .parquet files and hub datasets."""
    hub_config: str | None = None
    """Configuration of the hub dataset."""
    split: str = "train"
    """Split of the hub dataset."""
    streaming: bool = False
    """Read a hub dataset during scoring instead of downloading it first. (Files are always streamed.)"""
    batch_size: int = 8
    """Windows or questions per batch. Scores do not depend on it."""
    output: Path | None = None
    """Write the numbers of the table to this file as JSON, replacing an existing file. With tasks, answers are also
    saved beside it as they come, from which the same command resumes after an interruption."""
    dtype: DType = "auto"
    """dtype of the weights. auto: as saved."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps ... auto: the accelerator if there is one."""

    def check_paths(self) -> None:
        """Raise a LabError if a model or a text cannot be found, or the text has no readable format."""
        from kvshift_lab.data.files import find_corpus  # pyarrow
        from kvshift_lab.run.model_files import require_models  # the hub's package

        for text in self.texts:
            find_corpus(text, "texts")
        require_models(self.model, *self.against)

    def check(self) -> None:
        """Raise a LabError that names the invalid option, its value and the values that are allowed."""
        if self.tasks and self.texts:
            raise LabError(f"FILE and --tasks cannot be combined, got FILE {' '.join(self.texts)}")
        if not self.tasks and not self.texts:
            raise LabError(
                "FILE is missing: give a text to evaluate on (kvshift eval MODEL FILE ... --against MODEL ...), or "
                "benchmarks with --tasks"
            )
        require(self.window is None or self.window >= 2, "window", self.window, "2 or more, or None")
        require(self.stride is None or self.stride >= 1, "stride", self.stride, "1 or more, or None")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more, or None")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "1 or more")
        text = ("text_column", "hub_config", "split", "streaming", "packing", "stride", "begin")
        idle, measure = (text, "with tasks") if self.tasks else (("data", "limit"), "on a text")
        for name in idle:
            if getattr(self, name) != getattr(type(self), name):
                raise LabError(f"{name} has no effect {measure}: leave it out")
        if self.output is not None:
            require(
                self.output.parent.is_dir() and not self.output.is_dir(),
                "output",
                str(self.output),
                "a file in a folder that exists",
            )
