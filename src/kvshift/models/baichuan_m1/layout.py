"""Names and shapes in the released checkpoints and, below each, in this package.

    self_attn.conv_k, earlier K    (1, 1, G, 1, 2), previous token first
    self_attn.shift.alpha          (G, 2), current token first

    self_attn.conv_v, earlier V    the same as conv_k
    self_attn.shift.beta           the same as alpha

All other names and shapes are the same in both. Models are saved in the released layout.

Shapes: G KV heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform

_NAMES = {"conv_k": "shift.alpha", "conv_v": "shift.beta"}
_EARLIER = {"K": "shift.alpha", "V": "shift.beta"}
CONVOLUTIONS = _NAMES | _EARLIER
"""Names in an attention layer of a checkpoint, mapped to names in the model."""
BOTH_NAMES = (0, 0, 0)
"""Shape of the placeholder for a weight that is given under both names, which makes loading fail; no weight has it."""


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
        if len(input_dict) != 1:
            return {target_patterns[0]: torch.empty(BOTH_NAMES)}
        (tensors,) = input_dict.values()
        return {target_patterns[0]: to_coefficients(tensors[0] if isinstance(tensors, list) else tensors)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _ToReleased()


class _ToReleased(ConversionOps):
    """The inverse conversion, to the model's dtype where that is exact: loaded weights are saved as they were."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        (tensors,) = input_dict.values()
        released = to_released(tensors[0] if isinstance(tensors, list) else tensors)
        narrow = released.to(kwargs["model"].dtype)
        return {target_patterns[0]: narrow if torch.equal(narrow.to(released.dtype), released) else released}

    @property
    def reverse_op(self) -> ConversionOps:
        return _ToCoefficients()


class _SaveOnlyIfLoaded(WeightConverter):
    """A converter that saves weights under the earlier names only if they were loaded under them."""

    def reverse_transform(self) -> WeightTransform:
        return super().reverse_transform() if self.was_used() else self  # which matches no name in the model


def conversions() -> list[WeightConverter]:
    """Return the converters for `from_pretrained` of transformers and, reversed, for `save_pretrained`."""
    return [
        kind(f"self_attn.{released}", f"self_attn.{ours}", operations=[_ToCoefficients()])
        for kind, names in ((WeightConverter, _NAMES), (_SaveOnlyIfLoaded, _EARLIER))
        for released, ours in names.items()
    ]


def released_name(key: str) -> str:
    """Return the name in a checkpoint of a weight of the model."""
    for released, ours in _NAMES.items():
        key = key.replace(f"self_attn.{ours}", f"self_attn.{released}")
    return key


def both_names(key: str) -> str:
    """Return both names that a weight of the model has in checkpoints, joined by "and"."""
    released = released_name(key)
    start, _, last = released.rpartition(".")
    return f"{released} and {start}.{last[-1].upper()}"


def load_released_names(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Convert released weights in a state dict in place, before `load_state_dict`, as `Trainer` needs to resume."""
    for (released, ours), earlier in zip(_NAMES.items(), _EARLIER, strict=True):
        given = [prefix + name for name in (released, earlier) if prefix + name in state_dict]
        if len(given) == 2:
            raise ValueError(f"the weights have both {' and '.join(given)}, two names of one weight")
        for name in given:
            state_dict[prefix + ours] = to_coefficients(state_dict.pop(name))
