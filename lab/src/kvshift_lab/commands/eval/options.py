"""Options of `kvshift eval`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift_lab.core.errors import LabError, require
from kvshift_lab.variants.model_config import DType


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Models, and one of three measures: loss on a text (MODEL FILE ...), benchmarks (MODEL --tasks paper), or
    repetition in continuations of a text (MODEL FILE ... --repetition)."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a model on the hub."""
    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FILE ...]")] = ()
    """Text to evaluate on: files, folders, quoted globs or a hub dataset, as for --data.corpus of kvshift train.
    Several are read as one text. FILE and --tasks cannot be combined."""
    against: tuple[str, ...] = ()
    """More models; each is compared with the first on the same text, questions or prompts."""
    tasks: tuple[str, ...] = ()
    """Benchmarks: paper (the eight of its Table 2), table14 (MMLU in three formats), or any of
    lambada, winogrande, winogrande_letters, hellaswag, arc_easy, arc_easy_text, arc_challenge, arc_challenge_text,
    cmmlu, cmmlu_zero, mmlu, mmlu_zero, mmlu_cloze, math."""
    data: str | None = None
    """With tasks: folder of the benchmarks' files, or "hub". None: the folder in the environment variable
    KVSHIFT_SHARED_DATA if it is set, otherwise the hub."""
    limit: int | None = None
    """With tasks: only the first N questions of each task. None: all. With repetition: number of prompts. None: 100."""
    repetition: bool = False
    """Continue the text instead of scoring it, and measure repetition: rep-n, distinct-n, loops."""
    prompt_tokens: int = 32
    """With repetition: tokens per prompt."""
    max_new_tokens: int = 128
    """With repetition: maximum number of tokens per continuation."""
    temperature: float = 1.0
    """With repetition: temperature of the sampled continuations; the others are greedy."""
    repetition_penalty: float = 1.1
    """With repetition: penalty in half of the continuations; the other half has none."""
    seed: int = 0
    """With repetition: random seed of the samples."""
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
    """Windows, questions or prompts per batch. Scores do not depend on it; sampled continuations do."""
    output: Path | None = None
    """Write the numbers of the table to this file as JSON, replacing an existing file. With tasks or repetition,
    answers are also saved in NAME.answers.jsonl as they come, from which the same command resumes after an
    interruption."""
    dtype: DType = "auto"
    """dtype of the weights. auto: as saved."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps ... auto: the accelerator if there is one."""

    def check_paths(self) -> None:
        """Raise a LabError if a text cannot be found or has no readable format."""
        from kvshift_lab.data.files import find_corpus  # pyarrow

        for text in self.texts:
            find_corpus(text, "texts")

    def check(self) -> None:
        """Raise a LabError that names the invalid option, its value and the values that are allowed."""
        if self.tasks and self.repetition:
            raise LabError("--repetition and --tasks cannot be combined")
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
        for name in ("batch_size", "prompt_tokens", "max_new_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(0 < self.temperature < math.inf, "temperature", self.temperature, "more than 0")
        require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "more than 0")
        require(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")
        for name in self._without_effect():
            raise LabError(f"{name} has no effect {self._kind()}: leave it out")
        if self.output is not None:
            require(
                self.output.parent.is_dir() and not self.output.is_dir(),
                "output",
                str(self.output),
                "a file in a folder that exists",
            )

    def _kind(self) -> str:
        return "with tasks" if self.tasks else "with repetition" if self.repetition else "on a text"

    def _without_effect(self) -> list[str]:
        """Return the options that were given but have no effect on the selected measure."""
        text = ("text_column", "hub_config", "split", "streaming")
        scoring = ("packing", "stride", "begin")
        repetition = ("prompt_tokens", "max_new_tokens", "temperature", "repetition_penalty", "seed")
        idle = {
            "with tasks": (*text, *scoring, *repetition),
            "with repetition": (*scoring, "window", "data"),
            "on a text": ("data", "limit", *repetition),
        }[self._kind()]
        return [name for name in idle if getattr(self, name) != getattr(type(self), name)]
