"""The optimizer of all training runs: AdamW with the parameter groups of `kvshift.param_groups`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kvshift import clamp_after_step, param_groups
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.variants.variant import shift_layers


def adamw(model: nn.Module, options: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """Create AdamW for `model`; coefficients with the constraint "clamp" are clamped after each optimizer step."""
    # Under tensor parallelism some parameters are DTensors and some are not. PyTorch cannot update both in one call.
    mixed = len({isinstance(parameter, DTensor) for parameter in model.parameters()}) > 1
    groups = param_groups(
        model,
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
        shift_lr_multiplier=options.shift_lr_multiplier,
    )
    optimizer = torch.optim.AdamW(
        groups,
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
        fused=device.type == "cuda" and not mixed,
        foreach=False if mixed else None,
    )
    if any(layer.options.constraint == "clamp" for layer in shift_layers(model)):
        clamp_after_step(optimizer, model)
    return optimizer


def recompute_activations(model: Any) -> None:
    """Enable gradient checkpointing, with the method of transformers 5.23 or the older one, which it deprecates."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
