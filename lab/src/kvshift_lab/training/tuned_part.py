"""The option `tune`: training only a part of a model, with all other weights frozen."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils.import_utils import is_peft_available

from kvshift_lab.core.errors import LabError, install_command
from kvshift_lab.core.seeds import seed_for
from kvshift_lab.variants.variant import shift_layers

TunedPart = Literal["shift", "current", "lora", "shift+lora"]
LORA_RANK = 8


def tune_part(model: nn.Module, part: TunedPart, *, rank: int | None, seed: int) -> None:
    """Freeze all parameters of `model` except `part`. With LoRA, add adapters, whose output is 0 at first.

    Args:
        model: the model, which must have a shift unless `part` is "lora".
        part: "shift" trains only the coefficients, and "current" only those of the current token, without those of the
            lags. "lora" trains matrices A and B for each attention projection, to which their product B A is added,
            scaled by 2 (Hu et al. 2021); B is initialised to 0.
        rank: rank of LoRA. None: `LORA_RANK`.
        seed: random seed for the initial values of A.

    Raises:
        LabError: the model has no such part, or PEFT is not installed.
    """
    assert part in get_args(TunedPart)
    layers = shift_layers(model)
    if part != "lora" and not layers:
        raise LabError(f"tune is {part!r}, but the model has no shift; expected lora, or a model with a shift")
    if part == "current" and any(layer.options.constraint == "gate" for layer in layers):
        raise LabError(
            "tune is 'current', but with the constraint gate the coefficients of a head sum to 1; expected shift"
        )
    model.requires_grad_(False)
    if part in ("lora", "shift+lora"):
        _add_lora(model, LORA_RANK if rank is None else rank, seed)
    if part != "lora":
        for layer in layers:
            layer.requires_grad_(True)
    if part == "current":
        for layer in layers:
            for parameter in layer.parameters():
                parameter.register_hook(_first_column)


def merge_lora(model: nn.Module) -> None:
    """Merge LoRA's adapters into the weights, which restores the structure that the model had before `tune_part`."""
    if not is_peft_available():  # then the model has no adapters
        return
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, module.get_base_layer())


def _add_lora(model: nn.Module, rank: int, seed: int) -> None:
    if not is_peft_available():
        raise LabError(f"tune with LoRA needs the package peft: {install_command('peft')}")
    from peft import LoraConfig, inject_adapter_in_model

    found = [
        (f"{name}.{child}", isinstance(linear, Conv1D))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "shift", None), nn.Module)  # an attention module of any model family
        for child, linear in module.named_children()
        if isinstance(linear, (nn.Linear, Conv1D))
    ]
    transposed = any(is_transposed for _, is_transposed in found)
    config: Any = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=[name for name, _ in found], fan_in_fan_out=transposed
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed_for("LoRA", seed))
        inject_adapter_in_model(config, model)


def _first_column(gradient: Tensor) -> Tensor:
    """Zero the gradients of all lags but 0: AdamW without weight decay never changes a number whose gradient is 0."""
    kept = torch.zeros_like(gradient)
    kept[:, :1] = gradient[:, :1]
    return kept
