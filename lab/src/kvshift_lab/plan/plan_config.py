"""Options of `kvshift plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvshift_lab.data.config import DataConfig
from kvshift_lab.plan.cost import Precision, Sharding
from kvshift_lab.variants.model_config import ModelConfig

DeviceName = Literal["A100", "H100", "H200", "B200", "MI300X", "L40S", "RTX4090", "RTX5090"]


@dataclass(frozen=True, kw_only=True)
class PlanData:
    """Options of the data that costs depend on."""

    sequence_length: int | None = None
    """Tokens per sequence T. None: the model's longest context."""
    vocab_size: int = DataConfig.vocab_size
    """Vocabulary size, if neither model.vocab_size nor model.size nor model.config gives it."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The model and the run to plan. Without a size or shape under model: every size of the paper.

    Options that `kvshift train` also has are named as there, so that the config.json of a run can be given.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: PlanData = field(default_factory=PlanData)
    steps: int | None = None
    """Total number of optimizer steps. None: as many as the tokens need."""
    tokens: int | None = None
    """Tokens to train on, instead of steps. None: tokens_per_parameter times the parameters, if steps are not given."""
    tokens_per_parameter: float = 20.0
    """Training tokens per parameter. About 20 is compute-optimal (Hoffmann et al., 2022)."""
    batch_size: int | None = None
    """Sequences per forward pass and device. None: the most that fit in memory and divide the step."""
    tokens_per_step: int | None = None
    """Tokens per optimizer step over all devices. None: batch_size x sequence_length x devices, or, if batch_size is
    not given either, about 524288, the paper's half a million."""
    devices: int = 1
    """Total number of GPUs."""
    sharding: Sharding | None = None
    """none: a single device. ddp: a complete model on each device. fsdp: weights, gradients and optimizer states
    sharded over all devices. None: none for one device, ddp for several."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    bf16: Literal["auto", "yes", "no"] = "auto"
    """Compute matrix products in bfloat16, with float32 weights. no: everything in float32. auto: yes."""
    gpu: DeviceName = "H100"
    """GPU model, which sets peak_tflops and memory if these are not given."""
    peak_tflops: float | None = None
    """Peak throughput of one device in TFLOP/s. None: that of the GPU."""
    memory: float | None = None
    """Memory of one device in GiB, of which the plan uses 90 %. None: that of the GPU."""
    mfu: float = 0.4
    """Model FLOPs utilization, the fraction of the peak that is reached. This is an assumption: 0.3 to 0.5 is usual for
    large models on one machine, less for small ones."""
    tokens_per_second: float | None = None
    """Measured throughput of all devices together, used instead of peak and utilization. For one model only."""
    price_per_hour: float | None = None
    """Price of one device per hour, in any currency."""
    json: bool = False
    """Print JSON, in bytes, FLOPs and hours, instead of tables."""

    @property
    def precision(self) -> Precision:
        """Precision of matrix products."""
        return "fp32" if self.bf16 == "no" else "bf16"
