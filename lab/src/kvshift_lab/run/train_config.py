"""Options of `kvshift train`: frozen dataclasses, which also define its command line and the config.json of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvshift_lab.core import options
from kvshift_lab.core.errors import LabError, require
from kvshift_lab.core.options import ADDED_LATER, MACHINE_SPECIFIC, NO_EFFECT_ON_RESULTS, options_hash
from kvshift_lab.data.config import DataConfig
from kvshift_lab.variants.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Options of AdamW and of its learning rate schedule."""

    learning_rate: float = 2e-3
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """Learning rate schedule after the linear warm-up. constant: no decay. cosine: cosine decay to min_lr_ratio at the
    last step. wsd (warm-up, stable, decay): linear decay to min_lr_ratio over the last decay_fraction of all steps."""
    warmup_steps: int | None = None
    """Number of steps of linear warm-up. None: a tenth of all steps, at most 1000."""
    decay_fraction: float = 0.2
    """wsd: fraction of all steps during which the learning rate decays."""
    min_lr_ratio: float = 0.0
    """cosine and wsd: final learning rate, as a fraction of the peak."""
    beta1: float = 0.9
    """AdamW: decay per step of the running mean of gradients."""
    beta2: float = 0.95
    """AdamW: decay per step of the running mean of squared gradients."""
    epsilon: float = 1e-8
    """AdamW: term added to the denominator for numerical stability."""
    weight_decay: float = 0.1
    """Weight decay of matrices and embeddings; it is 0 for norms, biases and shift coefficients."""
    clip_norm: float = 1.0
    """Maximum norm of the gradient over all parameters (gradient clipping). 0: no clipping."""
    shift_lr_multiplier: float = 1.0
    """Learning rate of the shift coefficients, as a multiple of learning_rate."""

    def check(self, steps: int, warmup: int) -> None:
        """Raise a LabError that names the field, its value, and what it may be.

        Args:
            steps: number of steps of the run.
            warmup: number of its steps of warm-up, with the default applied.
        """
        for name in ("learning_rate", "epsilon"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"optimizer.{name}", value, "more than 0 and finite")
        for name in ("weight_decay", "clip_norm", "shift_lr_multiplier"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"optimizer.{name}", value, "0 or more, and finite")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "at least 0, less than 1")
        for name in ("decay_fraction", "min_lr_ratio"):
            require(0 <= getattr(self, name) <= 1, f"optimizer.{name}", getattr(self, name), "between 0 and 1")
        for name, schedules in (("min_lr_ratio", ("cosine", "wsd")), ("decay_fraction", ("wsd",))):
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default and self.schedule not in schedules:
                raise LabError(
                    f"optimizer.{name} is {value}, but schedule {self.schedule} has no decay that it describes"
                )
        require(warmup >= 0, "optimizer.warmup_steps", warmup, "0 or more, or None")
        if self.schedule == "wsd":
            most = steps - round(steps * self.decay_fraction)
            require(warmup <= most, "optimizer.warmup_steps", warmup, f"at most {most}, before the decay")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that all training runs have, on text and on tasks."""

    out: Path = field(metadata=MACHINE_SPECIFIC)
    """Folder of the run; created if missing."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 300
    """Total number of optimizer steps."""
    batch_size: int = 16
    """Sequences per forward pass and device."""
    seed: int = 0
    """Random seed for weights, coefficients and data order; each has a separate generator."""
    eval_every: int = 50
    """Number of steps between evaluations on the validation sequences; there is always one after the last step."""
    eval_rows: int | None = None
    """Evaluate on only the first N validation sequences. None: all."""
    save_every: int = 100
    """Number of steps between checkpoints; there is always one after the last step."""
    keep_checkpoints: int = field(default=2, metadata=NO_EFFECT_ON_RESULTS)
    """How many recent checkpoints to keep."""
    log_every: int = 10
    """Number of steps between lines of training metrics, each of which is a mean over these steps."""
    report_to: tuple[str, ...] = field(default=("tensorboard",), metadata=MACHINE_SPECIFIC)
    """Experiment trackers besides metrics.jsonl, by their names in transformers: tensorboard (in OUT/tensorboard),
    wandb, mlflow ... Give the option without a value for none."""
    compile: bool = False
    """Compile the model with torch.compile."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and takes about a third more time."""
    bf16: Literal["auto", "yes", "no"] = "auto"
    """Mixed precision: bfloat16 matrix products, float32 weights. auto: yes on GPUs that support it, no on CPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto: a GPU if there is one."""
    data_workers: int = field(default=0, metadata=MACHINE_SPECIFIC)
    """Number of worker processes that load training sequences. 0: the training process loads them."""
    progress: bool = field(default=True, metadata=MACHINE_SPECIFIC)
    """Show progress on stderr: a bar in a terminal, otherwise a line at most every ten seconds."""

    def check(self) -> None:
        """Raise a LabError that names the field, its value, and what it may be."""
        for name in ("steps", "batch_size", "eval_every", "save_every", "keep_checkpoints", "log_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.eval_rows is None or self.eval_rows >= 1, "eval_rows", self.eval_rows, "1 or more, or None")
        require(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")
        require(self.data_workers >= 0, "data_workers", self.data_workers, "0 or more")
        self.optimizer.check(self.steps, self.warmup_steps)

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps, with the default applied."""
        given = self.optimizer.warmup_steps
        return min(self.steps // 10, 1000) if given is None else given


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Options of one training run on text. Repeating the same command resumes an interrupted run."""

    init_from: str | None = field(default=None, metadata=ADDED_LATER)
    """Start from the weights and the tokenizer of this model: a run folder, a model folder, or a name on the hub. It
    must be a Llama, with or without KV shift, or an output of `kvshift retrofit`. With a Llama, `model` options that
    are not given are taken from it, and an added shift is initialised to the identity."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    probes: Literal["induction"] | None = field(default=None, metadata=NO_EFFECT_ON_RESULTS)
    """What to measure at each evaluation besides the loss; training itself is not affected. induction: scores of the
    heads on repeated random tokens, and the validation loss by whether a pair of tokens occurred before."""
    tokens_per_step: int | None = None
    """Tokens per optimizer step over all devices. If that is more than batch_size x sequence_length x devices,
    gradients are accumulated. None: exactly that product."""

    def check_paths(self) -> None:
        """Raise a LabError if a text file or folder is missing or cannot be read."""
        from kvshift_lab.data.files import find_texts  # imports pyarrow

        find_texts(self.data.corpus, self.data.validation)

    def check(self) -> None:
        """Raise a LabError that names the field, its value, and what it may be."""
        super().check()
        tokens = self.tokens_per_step
        require(tokens is None or tokens >= 1, "tokens_per_step", tokens, "1 or more, or None")
        if self.data.streaming:
            require(self.data_workers <= 1, "data_workers", self.data_workers, "0 or 1 with data.streaming")
        if self.init_from is None:  # records of such runs name the tokenizer of the start model
            self._refuse_without_effect("vocab_size", tokenizer=self.data.tokenizer)
        self._refuse_without_effect(
            "validation_fraction", validation=self.data.validation, streaming=self.data.streaming
        )

    def _refuse_without_effect(self, name: str, **others: Any) -> None:
        """Raise a LabError if the data option `name` was changed although one of the `others` takes its place."""
        value = getattr(self.data, name)
        for other, given in others.items():
            if given and value != getattr(DataConfig, name):
                raise LabError(f"data.{name} is {value}, but has no effect with data.{other} {given}")

    def accumulation(self, devices: int) -> int:
        """Return the number of forward passes of each device per optimizer step."""
        at_once = self.batch_size * self.data.sequence_length * devices
        tokens = self.tokens_per_step or at_once
        if tokens % at_once:
            raise LabError(
                f"tokens_per_step must be a multiple of {at_once} = batch_size {self.batch_size} x "
                f"data.sequence_length {self.data.sequence_length} x {devices} device(s), got {tokens}"
            )
        return tokens // at_once


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash (16 hexadecimal digits) of all options that affect a run's results; `config` is from `to_json`."""
    return options_hash(TrainConfig, config)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line for each option that affects a run's results and differs between `old` and `new`."""
    return [*options.differences(TrainConfig, old, new).values()]
