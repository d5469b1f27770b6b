"""GPT-2 with KV shift from its formulas, the reference for everything else: one sequence, no cache, no transformers.

Shapes: T positions, H heads, D head size, E model width, V vocabulary, W window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.layers.attention_reference import attend, constrained, shift


def gpt2_hidden(weights: Mapping[str, Tensor], config: Any, tokens: Sequence[int]) -> Tensor:
    """Return the last hidden states (T, E) of one document, in the dtype of the weights; differentiable.

    Args:
        weights: A state dict under the names of a GPT2Model's checkpoint.
        config: Any object with the fields of `KVShiftGPT2Config`.
        tokens: The document.
    """
    x_TE = weights["wte.weight"][torch.tensor(list(tokens))] + weights["wpe.weight"][: len(tokens)]
    for i in range(config.n_layer):
        prefix = f"h.{i}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        x_TE = x_TE + _attention(layer, config, _layer_norm(layer, "ln_1", x_TE, config))
        if "mlp.c_fc.weight" in layer:
            h_TF = _linear(layer, "mlp.c_fc", _layer_norm(layer, "ln_2", x_TE, config))
            h_TF = 0.5 * h_TF * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h_TF + 0.044715 * h_TF**3)))
            x_TE = x_TE + _linear(layer, "mlp.c_proj", h_TF)
    return _layer_norm(weights, "ln_f", x_TE, config)


def gpt2_logits(weights: Mapping[str, Tensor], config: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits (T, V) of one document, for weights under the names of a GPT2LMHeadModel's checkpoint."""
    inner = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    return gpt2_hidden(inner, config, tokens) @ weights["lm_head.weight"].T


def _attention(layer: Mapping[str, Tensor], config: Any, x_TE: Tensor) -> Tensor:
    projected = zip(_linear(layer, "attn.c_attn", x_TE).chunk(3, dim=1), ("gamma", "alpha", "beta"), strict=True)
    q_THD, k_THD, v_THD = (
        shift(
            heads_TE.reshape(x_TE.shape[0], config.n_head, -1),
            constrained(layer.get(f"attn.shift.{name}"), config.shift_constraint),
        )
        for heads_TE, name in projected
    )
    return _linear(layer, "attn.c_proj", attend(q_THD, k_THD, v_THD))


def _linear(layer: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ layer[f"{name}.weight"] + layer[f"{name}.bias"]  # GPT-2 stores its matrices as (in, out)


def _layer_norm(layer: Mapping[str, Tensor], name: str, x: Tensor, config: Any) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + config.layer_norm_epsilon).sqrt()
    return scaled * layer[f"{name}.weight"] + layer[f"{name}.bias"]
