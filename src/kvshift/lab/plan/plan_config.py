"""What `kvshift plan` is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvshift.lab.data.config import DataConfig
from kvshift.lab.plan.cost import Precision, Sharding
from kvshift.lab.training.train_config import ModelConfig

__all__ = ["DeviceName", "PlanConfig", "PlanData"]

DeviceName = Literal["A100", "H100", "H200", "B200", "MI300X", "L40S", "RTX4090", "RTX5090"]


@dataclass(frozen=True, kw_only=True)
class PlanData:
    """What of the data decides costs."""

    sequence_length: int | None = None
    """Tokens in a sequence T; None: the longest that the model is made for."""
    vocab_size: int = DataConfig.vocab_size
    """Tokens of the tokenizer, where neither model.vocab_size nor the size or file of the model says how many."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan for. Without a size or shape under model: every size of the paper.

    What `kvshift train` has too is spelled as there, so that the config.json of a run can be planned with.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: PlanData = field(default_factory=PlanData)
    steps: int | None = None
    """Optimizer steps in all; None: as many as the tokens take."""
    tokens: int | None = None
    """Tokens to train on, in place of steps; None, without steps: tokens_per_parameter times the parameters."""
    tokens_per_parameter: float = 20.0
    """Tokens for each parameter; about 20 is the best use of FLOPs (Hoffmann et al., 2022), more of a small model."""
    batch_size: int | None = None
    """Sequences in one forward pass of one device; None: the most that fit and divide the step."""
    tokens_per_step: int | None = None
    """Tokens in one optimizer step over all devices. None: batch_size x sequence_length x devices; and where batch_size
    is not given either, about 524288, the paper's half a million."""
    devices: int = 1
    """GPUs in all."""
    sharding: Sharding | None = None
    """none: one device. ddp: a whole model on each. fsdp: weights, gradients and optimizer spread over all. None: none
    with one device, ddp with several."""
    gradient_checkpointing: bool = False
    """Recompute the activations of a layer in its backward pass."""
    bf16: Literal["auto", "yes", "no"] = "auto"
    """Matrix products in bfloat16, weights in float32; no: everything in float32; auto: yes, as every GPU below can."""
    gpu: DeviceName = "H100"
    """Kind of GPU: its peak and its memory, where the next two are not given."""
    peak_tflops: float | None = None
    """Peak of one device, TFLOP/s."""
    memory: float | None = None
    """Memory of one device, GiB; nine tenths of it are planned with."""
    mfu: float = 0.4
    """Model FLOPs utilization: the part of the peak that is reached. Assumed, not measured: 0.3 to 0.5 is usual for
    large models on one machine, less for small ones."""
    tokens_per_second: float | None = None
    """Measured throughput of all devices together; then peak and utilization do not matter. For one model only."""
    price_per_hour: float | None = None
    """Of one device, in any currency."""
    json: bool = False
    """Print JSON, in bytes, FLOPs and hours, instead of tables."""

    @property
    def precision(self) -> Precision:
        """Of matrix products."""
        return "fp32" if self.bf16 == "no" else "bf16"
