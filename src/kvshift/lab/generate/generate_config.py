"""What `kvshift generate` is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvshift.lab.errors import LabError, require
from kvshift.lab.training.train_config import DType

__all__ = ["GenerateConfig"]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to continue, with which model, and how the next token is chosen."""

    model: Annotated[str, tyro.conf.Positional]
    """A run folder, a model folder, or a model on the hub."""
    prompt: str | None = None
    """Text to continue; "-" reads it from stdin, less one newline at its end. "": from the token that begins a text."""
    prompts: Path | None = None
    """File of prompts instead: .txt, one a line, or .jsonl with the field prompt; blank lines do not count. The answers
    are JSON lines."""
    crop_prompts: bool = False
    """Leave out the beginning of prompts that are too long for the model. Otherwise they are an error."""
    output: Path | None = None
    """File that JSON lines are appended to; a command that was stopped resumes where it was. None: stdout."""
    max_new_tokens: int | None = None
    """Tokens to generate at most; fewer where the model ends the text. None: 128, or as many as the model's context
    leaves beside the longest prompt."""
    temperature: float = 0.8
    """Logits are divided by this before a token is drawn; 0: the likeliest token, nothing is drawn."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability; 1: from all."""
    min_p: float = 0.0
    """Draw from tokens at least this part as likely as the likeliest; 0: from all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that have occurred are divided by this (negative ones multiplied); 1: nothing."""
    num_beams: int = 1
    """Beams of a beam search; 1: none."""
    prompt_lookup: int = 0
    """Draft this many tokens at once from where the text repeats itself: the same answers, faster; 0: none."""
    samples: int = 1
    """Continuations of each prompt."""
    seed: int = 0
    """Of the draws; the same seed and options give the same texts on the same machine."""
    batch_size: int = 8
    """Prompts continued at once; one with a repetition penalty or prompt lookup."""
    echo: bool = True
    """Print the prompt before its continuation, where text is printed."""
    dtype: DType = "auto"
    """Of the weights; auto: as they were saved."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps ...; auto: the accelerator where there is one."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        if (self.prompt is None) == (self.prompts is None):
            raise LabError("exactly one of prompt and prompts must be given")
        new = self.max_new_tokens
        require(new is None or new >= 1, "max_new_tokens", new, "1 or more, or None")
        for name in ("num_beams", "samples", "batch_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("top_k", "prompt_lookup"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "more than 0")
        require(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")
        if self.samples > 1 and self.temperature == 0:
            raise LabError(f"samples must be 1 with temperature 0, which draws nothing; got {self.samples}")
        if self.num_beams > 1 and self.samples > self.num_beams:
            raise LabError(f"samples must not be more than num_beams ({self.num_beams}), got {self.samples}")
        if self.num_beams > 1 and self.prompt_lookup:
            raise LabError("prompt_lookup must be 0 with num_beams: a beam search takes no drafts")
