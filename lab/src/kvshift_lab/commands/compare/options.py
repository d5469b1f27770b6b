"""Options of `kvshift compare`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro

from kvshift_lab.core.errors import LabError, require, require_unicode
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.variants.by_name import VARIANTS, find_entry, refinements


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """A comparison. Repeating the same command resumes it; finished runs are kept."""

    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(
        default_factory=lambda: TrainConfig(out=Path("runs/compare"), steps=400)
    )
    """Options that all models share. `out` is the folder of the comparison, `seed` is the first seed, and
    `model.shift_*` affects only kv-shift."""
    variants: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help=f"Two or more of {', '.join(VARIANTS)}. All others are compared with the first."),
    ] = ("vanilla", "kv-shift")
    equal_parameters: bool = False
    """Narrow the MLPs so that each variant has as many parameters as vanilla, to within half a unit of width (one unit
    is 3 E parameters per layer). Otherwise all MLPs have the same width."""
    seeds: int = 1
    """Number of runs of each variant, with seeds `seed`, `seed` + 1 and so on; 3 or more give a 95 % interval."""
    step_time_seconds: float = 15.0
    """Seconds to spend on timing training steps of all models in turn, after training. 0: no timing."""
    prompt: str | None = None
    """Prompt of the samples. None: the first 16 tokens of the validation text."""
    sample_tokens: int = 120
    """Number of tokens in each sample, as far as the model has positions. 0: no samples."""
    temperature: float = 0.8
    """Sampling temperature. 0: always the most likely token."""

    def check_paths(self) -> None:
        """Raise a LabError for text that exists but cannot be read."""
        self.train.check_paths()

    def check(self) -> None:
        """Raise a LabError that names a wrong field, its value and the allowed values."""
        require(self.seeds >= 1, "seeds", self.seeds, "1 or more")
        for name in ("step_time_seconds", "sample_tokens", "temperature"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        if self.prompt == "":
            raise LabError("prompt must not be empty")
        require_unicode(self.prompt or "", "prompt")
        self._check_variants()
        if "RANK" in os.environ:
            raise LabError("compare starts its own processes, one after the other: start it without torchrun")
        self.train.check()

    def with_seeds(self, seeds: int) -> str:
        """Return the shell command that continues this comparison with `seeds` seeds; finished runs are kept.

        The command reads the options that all models share from compare.json in the folder of the comparison.
        """
        called = Path(sys.argv[0])
        program = [str(called)] if called.name == "kvshift" else ["python", "-m", "kvshift_lab"]
        if shutil.which("kvshift") == program[0]:
            program = ["kvshift"]
        words = [*program, "compare", "--config", str(self.train.out / "compare.json"), "--out", str(self.train.out)]
        for item in fields(self):
            value = seeds if item.name == "seeds" else getattr(self, item.name)
            if item.name != "train" and value != item.default:
                option = f"--{item.name.replace('_', '-')}"
                if isinstance(value, tuple):
                    words += [option, *value]
                else:
                    words.append(option if value is True else f"{option}={value}")
        return shlex.join(words)

    def _check_variants(self) -> None:
        model, entries = self.train.model, [find_entry(name, "variants") for name in self.variants]
        if len(set(self.variants)) < max(2, len(self.variants)):
            raise LabError(f"variants must be two or more different names, got {' '.join(self.variants) or 'none'}")
        if model.variant is not None:
            raise LabError(f"model.variant ({model.variant}) is only for kvshift train; add it to variants instead")
        if model.shift_targets == ():
            raise LabError("model.shift_targets must name at least one of q, k, v: with none, kv-shift equals vanilla")
        for name, default in refinements(model):
            value = getattr(model, name)
            if value != default and not any(entry.shifts and name not in entry.fixes for entry in entries):
                raise LabError(
                    f"model.{name} is {value!r}, but applies to none of the variants {', '.join(self.variants)}"
                )
        if self.equal_parameters and self.train.init_from is not None:
            raise LabError("equal_parameters cannot be combined with init_from, whose MLPs have a fixed width")
        others = [entry.name for entry in entries if not entry.shifts and entry.name != "vanilla"]
        if self.train.init_from is not None and others:
            raise LabError(f"variants has {others[0]}, but with init_from only vanilla and plain shifts are possible")
