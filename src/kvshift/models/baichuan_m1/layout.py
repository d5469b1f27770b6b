"""Weights whose name or shape differs: in checkpoints and, below or behind it, in the model.

    self_attn.conv_k, earlier K    (1, 1, G, 1, 2), previous token first
    self_attn.shift.alpha          (G, 2), current token first

    self_attn.conv_v, earlier V    the same as conv_k
    self_attn.shift.beta           the same as alpha

    lm_head.weight, lm_head.raw    (V, E)

Models are saved with the first name.

Shapes: G KV heads, E model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

_NAMES = {"self_attn.shift.alpha": ["self_attn.conv_k", "self_attn.K"]}
_NAMES |= {"self_attn.shift.beta": ["self_attn.conv_v", "self_attn.V"], "lm_head.raw": ["lm_head.weight"]}


def to_coefficients(conv: Tensor) -> Tensor:
    """Convert a released weight (1, 1, G, 1, 2), previous token first, to coefficients (G, 2), current token first.

    A tensor of another shape is returned in a shape that no parameter has, so that loading refuses it.
    """
    if conv.ndim == 5 and conv.shape[:2] == (1, 1) and conv.shape[3] == 1:
        return conv[0, 0, :, 0].flip(-1)
    return conv if conv.ndim == 5 else conv.reshape(-1)


def to_released(coefficients: Tensor) -> Tensor:
    """Convert coefficients to a released weight: the inverse of `to_coefficients`."""
    return coefficients.flip(-1)[None, None, :, None].contiguous()


class _ToCoefficients(ConversionOps):
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        found = [to_coefficients(tensor) for tensors in input_dict.values() for tensor in tensors]
        # Under both names, (G, 4): a shape that is refused.
        return {target_patterns[0]: found[0] if len(found) == 1 else torch.cat(found, dim=-1)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _ToReleased()


class _ToReleased(ConversionOps):
    """The inverse conversion, to the model's dtype where that is exact: loaded weights are saved as they were."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        ((coefficients,),) = input_dict.values()
        released = to_released(coefficients)
        narrow = released.to(kwargs["model"].dtype)
        return {target_patterns[0]: narrow if torch.equal(narrow.to(released.dtype), released) else released}

    @property
    def reverse_op(self) -> ConversionOps:
        return _ToCoefficients()


def conversions() -> list[WeightTransform]:
    """Return the conversions for `from_pretrained` of transformers and, reversed, for `save_pretrained`."""
    return [
        WeightConverter(names, ours, [_ToCoefficients()]) if "shift" in ours else WeightRenaming(names, ours)
        for ours, names in _NAMES.items()
    ]


def released_name(key: str) -> str:
    """Return the name in a checkpoint of a weight of the model."""
    for ours, names in _NAMES.items():
        key = key.replace(ours, names[0])
    return key


def load_released_names(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Convert released weights in a state dict in place, before `load_state_dict`, as `Trainer` needs to resume."""
    converted = {}
    for key in list(state_dict):
        for ours, names in _NAMES.items():
            name = next((name for name in names if key == name or key.endswith(f".{name}")), None)
            if name is not None:
                new, weight = key.removesuffix(name) + ours, state_dict.pop(key)
                if new in converted:
                    raise ValueError(
                        f"the weights have {released_name(new)} under two of its names, {', '.join(names)}"
                    )
                converted[new] = to_coefficients(weight) if "shift" in ours else weight
    state_dict |= converted
