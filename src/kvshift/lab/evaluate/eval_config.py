"""What `kvshift eval` is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvshift.lab.errors import LabError, require
from kvshift.lab.training.train_config import DType

__all__ = ["EvalConfig"]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Which models, and by what: a text (MODEL FILE ...), benchmarks (MODEL --tasks paper), or how much they repeat
    themselves when they continue a text (MODEL FILE ... --repetition)."""

    model: Annotated[str, tyro.conf.Positional]
    """A run folder, a model folder, or a model on the hub."""
    texts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Files, folders, quoted globs or a hub dataset: whatever --data.corpus of kvshift train takes. Together they are
    one text."""
    against: tuple[str, ...] = ()
    """More models, each compared with the first on the same text, questions or prompts."""
    tasks: tuple[str, ...] = ()
    """Benchmarks instead of a text: paper (the eight of its Table 2), table14 (MMLU in three formats), or any of
    lambada, winogrande, winogrande_letters, hellaswag, arc_easy, arc_easy_text, arc_challenge, arc_challenge_text,
    cmmlu, cmmlu_zero, mmlu, mmlu_zero, mmlu_cloze, math."""
    data: str | None = None
    """With tasks: folder of their files, or hub. None: the folder that the environment variable KVSHIFT_SHARED_DATA
    names, else the hub."""
    limit: int | None = None
    """With tasks: the first so many questions of each alone. With repetition: so many prompts; None: 100."""
    repetition: bool = False
    """Continue the text instead of scoring it, and count what the continuations repeat: rep-n, distinct-n, loops."""
    prompt_tokens: int = 32
    """With repetition: tokens of a prompt."""
    max_new_tokens: int = 128
    """With repetition: tokens of a continuation; fewer where the model ends the text."""
    temperature: float = 1.0
    """With repetition: of the continuations that are drawn; others are greedy."""
    repetition_penalty: float = 1.1
    """With repetition: the penalty of every other continuation; the rest have none."""
    seed: int = 0
    """With repetition: of the draws."""
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
    """Windows, questions or prompts at once. It changes no score, but what is drawn with repetition."""
    output: Path | None = None
    """File for the numbers of the table as JSON; replaced where it is there. With tasks or repetition, what
    models answer is kept in NAME.answers.jsonl beside it at once, and a command that was stopped resumes from there."""
    dtype: DType = "auto"
    """Of the weights; auto: as they were saved."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps ...; auto: the accelerator where there is one."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        if self.tasks and self.repetition:
            raise LabError("repetition must not be given together with tasks: one command, one measure")
        if self.tasks and self.texts:
            raise LabError(f"texts must be empty with tasks, which bring their own; got {', '.join(self.texts)}")
        if not self.tasks and not self.texts:
            raise LabError(
                "texts must name what to evaluate on, behind the model: kvshift eval RUN_OR_MODEL FILE ... "
                "--against MODEL ...; for benchmarks, give --tasks"
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
        """Options that were given for another measure than the one that was asked for."""
        text = ("text_column", "hub_config", "split", "streaming")
        scoring = ("packing", "stride", "begin")
        repetition = ("prompt_tokens", "max_new_tokens", "temperature", "repetition_penalty", "seed")
        idle = {
            "with tasks": (*text, *scoring, *repetition),
            "with repetition": (*scoring, "window", "data"),
            "on a text": ("data", "limit", *repetition),
        }[self._kind()]
        return [name for name in idle if getattr(self, name) != getattr(type(self), name)]
