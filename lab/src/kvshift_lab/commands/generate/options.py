"""Options of `kvshift generate`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvshift_lab.core.errors import LabError, require
from kvshift_lab.variants.model_config import DType


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Options of `kvshift generate`: the model, the prompts, and how tokens are chosen."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a model on the hub."""
    prompt: str | None = None
    """Text to continue. "-": read it from stdin, without the final newline. "": start with the beginning-of-text
    token."""
    prompts: Path | None = None
    """File of prompts: .txt with one prompt per line, or .jsonl with the field "prompt"; blank lines are skipped. The
    output is JSON lines."""
    crop_prompts: bool = False
    """Drop the beginning of prompts that are too long for the model. Otherwise they are an error."""
    output: Path | None = None
    """Append JSON lines to this file; the same command resumes after an interruption. None: print to stdout."""
    max_new_tokens: int | None = None
    """Maximum number of tokens to generate. None: 128, or fewer if the model's maximum length leaves less room after
    the longest prompt."""
    temperature: float = 0.8
    """Sampling temperature. 0: greedy decoding."""
    top_k: int = 0
    """Sample from only this number of most likely tokens. 0: from all."""
    top_p: float = 1.0
    """Sample from only the most likely tokens whose probabilities add up to this. 1: from all."""
    min_p: float = 0.0
    """Sample from only the tokens with at least this fraction of the highest probability. 0: from all."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens that have occurred by this (multiply them if negative). 1: no penalty."""
    num_beams: int = 1
    """Number of beams. 1: no beam search."""
    prompt_lookup: int = 0
    """Speculative decoding: draft this many tokens from repetitions in the text. The output is the same. 0: off."""
    samples: int = 1
    """Number of continuations per prompt."""
    seed: int = 0
    """Random seed; the same seed and options give the same texts on the same machine."""
    batch_size: int = 8
    """Number of prompts per batch. With a repetition penalty or prompt lookup it is always 1."""
    echo: bool = True
    """Print the prompt before its continuation (text output only)."""
    dtype: DType = "auto"
    """dtype of the weights. auto: as saved."""
    device: str = "auto"
    """Device: cpu, cuda, cuda:1, mps ... auto: the accelerator if there is one."""

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
        for name, neutral in {"samples": 1, "top_k": 0, "top_p": 1, "min_p": 0}.items():
            value = getattr(self, name)
            require(
                self.temperature > 0 or value == neutral, name, value, f"{neutral} with temperature 0 (greedy decoding)"
            )
        if self.num_beams > 1 and self.samples > self.num_beams:
            raise LabError(f"samples must not be more than num_beams ({self.num_beams}), got {self.samples}")
        if self.num_beams > 1 and self.prompt_lookup:
            raise LabError("prompt_lookup must be 0 with num_beams > 1: a beam search cannot use drafts")
