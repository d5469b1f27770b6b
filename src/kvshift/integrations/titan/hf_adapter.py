"""Conversion of torchtitan checkpoints to the Hugging Face layout of this package, and back."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.state_dict_adapter import StateDictAdapter

_TITAN, _HUGGING_FACE = ".attention.shift.", ".self_attn.shift."


def with_coefficients(stock: type[StateDictAdapter]) -> type[StateDictAdapter]:
    """Return a subclass of the adapter `stock` that converts the coefficients too.

    layers.I.attention.shift.alpha, (W, N)  <->  model.layers.I.self_attn.shift.alpha, (N, W)
    """

    class ShiftStateDictAdapter(stock):
        """torchtitan's adapter, extended to the coefficients."""

        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            """Convert a state dict of torchtitan's model to one of `kvshift.models`."""
            coefficients = {name: x for name, x in state_dict.items() if _TITAN in name}
            converted = super().to_hf({name: x for name, x in state_dict.items() if name not in coefficients})
            for name, x in coefficients.items():
                converted["model." + name.replace(_TITAN, _HUGGING_FACE)] = x.transpose(0, 1).contiguous()
            return converted

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            """Convert a state dict of `kvshift.models` to one of torchtitan's model."""
            coefficients = {name: x for name, x in hf_state_dict.items() if _HUGGING_FACE in name}
            rest = {name: x for name, x in hf_state_dict.items() if name not in coefficients}
            converted = super().from_hf(rest)
            for name, x in coefficients.items():
                name = name.removeprefix("model.").replace(_HUGGING_FACE, _TITAN)
                converted[name] = x.transpose(0, 1).contiguous()
            return converted

    return ShiftStateDictAdapter
