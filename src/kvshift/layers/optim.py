"""Optimizer support for the coefficients: parameter groups, and clamping after each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from kvshift.layers.shift import KVShift


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    shift_lr_multiplier: float = 1.0,
) -> list[dict[str, Any]]:
    """Divide the trainable parameters of a model into groups for a PyTorch optimizer.

    Weight decay applies to matrices and embeddings, but not to vectors (norms, biases). It does not apply to shift
    coefficients either, although they are (G, W) matrices: it would pull the coefficient of the current token to 0,
    not to 1, and switch the head off.

        optimizer = torch.optim.AdamW(param_groups(model, lr=2e-4), betas=(0.9, 0.95))

    Args:
        model: any module; its `KVShift` layers are found at any depth.
        lr: learning rate of the first two groups.
        weight_decay: weight decay of the first group; 0.1 in the paper.
        shift_lr_multiplier: the learning rate of the coefficients is `lr * shift_lr_multiplier`.

    Returns:
        Groups named "decay", "no_decay" and "shift", each with "params", "lr" and "weight_decay". Empty groups are
        omitted, and a parameter shared by several modules occurs once.

    Raises:
        TypeError: `model` is not a module.
        ValueError: a number is negative, or FSDP has flattened the coefficients.
    """
    _check_model(model)
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("shift_lr_multiplier", shift_lr_multiplier)):
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")
    coefficients = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, KVShift)
        for parameter in module.parameters()  # also of its children: the originals of parametrizations
    }
    groups: dict[str, dict[str, Any]] = {
        "decay": {"lr": lr, "weight_decay": weight_decay},
        "no_decay": {"lr": lr, "weight_decay": 0.0},
        "shift": {"lr": lr * shift_lr_multiplier, "weight_decay": 0.0},
    }
    for parameter in model.parameters():
        if parameter.requires_grad:
            name = "shift" if id(parameter) in coefficients else "decay" if parameter.ndim >= 2 else "no_decay"
            groups[name].setdefault("params", []).append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if "params" in group]


def clamp_after_step(optimizer: torch.optim.Optimizer, model: nn.Module) -> RemovableHandle:
    """Clamp the coefficients of every "clamp" layer to [0, 1] after each step of `optimizer`.

        a <- min(max(a, 0), 1)

    This is the "0 to 1" variant of the paper (appendix F.1). Without it, the layers clamp only in forward, and a
    coefficient that has left the interval gets no gradient that could bring it back.

    Returns:
        A handle whose `remove()` stops the clamping.

    Raises:
        ValueError: there is no such layer, or its coefficients are computed by a parametrization or flattened by FSDP.
    """
    _check_model(model)
    layers = [
        module for module in model.modules() if isinstance(module, KVShift) and module.options.constraint == "clamp"
    ]
    if not layers:
        raise ValueError('model has no KVShift layer with constraint="clamp"')
    if any(map(is_parametrized, layers)):
        raise ValueError("model has a parametrized KVShift layer, whose coefficients are not parameters to be clamped")

    @torch.no_grad()
    def clamp(*_: Any) -> None:
        for layer in layers:
            for parameter in layer.parameters(recurse=False):
                parameter.clamp_(0, 1)

    wrapped = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper takes no hooks
    return wrapped.register_step_post_hook(clamp)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not its parameters; got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, KVShift) and module.targets and next(module.parameters(), None) is None:
            raise ValueError(
                f"model must still have the parameters of its layers, but {name or 'the layer'} has none: "
                "FullyShardedDataParallel flattens them unless it is given use_orig_params=True"
            )
