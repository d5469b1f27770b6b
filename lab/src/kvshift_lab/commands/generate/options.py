"""Options of `kvshift generate`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvshift_lab.core.errors import LabError, require, require_unicode
from kvshift_lab.variants.model_config import DType


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Options of `kvshift generate`: the model, the prompts, and how tokens are chosen.

    For beams, drafts and other ways to choose, load the model as docs/runs.md says and call
    transformers' `model.generate`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a model on the hub."""
    prompt: str | None = None
    """Text to continue. "": start with the beginning-of-text token."""
    prompts: Path | None = None
    """File with one prompt per line; blank lines are skipped. The output is JSON lines."""
    max_new_tokens: int | None = None
    """Maximum number of tokens to generate. None: 128, or fewer if the model's maximum length leaves less room."""
    temperature: float = 0.8
    """Sampling temperature. 0: greedy decoding."""
    top_p: float = 1.0
    """Sample from only the most likely tokens whose probabilities add up to this. 1: from all."""
    samples: int = 1
    """Number of continuations per prompt."""
    seed: int = 0
    """Random seed; the same seed and options give the same texts on the same machine."""
    dtype: DType = "auto"
    """dtype of the weights. auto: as saved."""
    device: str = "auto"
    """Device: cpu, cuda, cuda:1, mps ... auto: the accelerator if there is one."""

    def check_paths(self) -> None:
        """Raise a LabError if there is no such model."""
        from kvshift_lab.run.model_files import require_models  # the hub's package

        require_models(self.model)

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        if (self.prompt is None) == (self.prompts is None):
            raise LabError("exactly one of prompt and prompts must be given")
        require_unicode(self.prompt or "", "prompt")
        new = self.max_new_tokens
        require(new is None or new >= 1, "max_new_tokens", new, "1 or more, or None")
        require(self.samples >= 1, "samples", self.samples, "1 or more")
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0 and at most 1")
        require(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")
        for name in ("samples", "top_p"):
            value = getattr(self, name)
            require(self.temperature > 0 or value == 1, name, value, "1 with temperature 0 (greedy decoding)")
