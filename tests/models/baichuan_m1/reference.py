"""Baichuan-M1 from its formulas: one sequence, no cache, no batch, weights by released names.

Shapes: T positions, H query heads, G KV heads, D head size, E model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.layers.attention_reference import attend, rotate, shift

from ..llama.reference import reference_logits

_KNOWN: dict[tuple, tuple[Mapping[str, Tensor], Tensor]] = {}


def logits(weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
    """Return the logits (T, V) of one document, in the dtype of the weights; differentiable.

    Args:
        weights: Weights of a checkpoint, by their released names.
        config: Contents of its config.json.
        tokens: The document.
    """
    head = weights["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    rows = head / (head.square().sum(1, keepdim=True).sqrt() + 1e-7)
    fields = SimpleNamespace(**{**config, "tie_word_embeddings": False})
    return reference_logits({**weights, "lm_head.weight": rows}, fields, tokens, _attention)


def logits_of_state_dict(weights: Mapping[str, Tensor], config: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits for a model's state dict and configuration, after conversion of the coefficients.

    Results are cached, as long as no weight is written to.
    """
    state = tuple((tensor.data_ptr(), tensor._version) for tensor in weights.values())
    known = _KNOWN.get((state, tuple(tokens)))
    if known is not None:
        return known[1]
    kernels = {"shift.alpha": "conv_k", "shift.beta": "conv_v"}
    released = {name.replace("lm_head.raw", "lm_head.weight"): tensor for name, tensor in weights.items()}
    for name, tensor in weights.items():
        for ours, theirs in kernels.items():
            if name.endswith(ours):
                previous_last = torch.stack([tensor[:, 1], tensor[:, 0]], dim=1)
                released[name.replace(ours, theirs)] = previous_last.reshape(1, 1, -1, 1, 2)
    found = logits(released, config.to_dict(), tokens)
    _KNOWN[state, tuple(tokens)] = weights, found  # keep the weights, so that their memory is not reused
    return found


def _attention(layer: Mapping[str, Tensor], config: Any, x_TE: Tensor, number: int) -> Tensor:
    heads, kv_heads, window = config.num_attention_heads, config.num_key_value_heads, None
    if number in config.sliding_window_layers:
        heads = getattr(config, "num_swa_attention_heads", None) or heads
        kv_heads = getattr(config, "num_swa_key_value_heads", None) or kv_heads
        window = config.sliding_window
    packed = (x_TE @ layer["self_attn.W_pack.weight"].T).view(x_TE.shape[0], -1, config.hidden_size // heads)
    q_THD, k_TGD, v_TGD = packed.split([heads, kv_heads, kv_heads], dim=1)
    k_TGD = _convolution(layer["self_attn.conv_k"], k_TGD)
    v_TGD = _convolution(layer["self_attn.conv_v"], v_TGD)
    q_THD, k_TGD = rotate(q_THD, config.rope_theta), rotate(k_TGD, config.rope_theta)
    return attend(q_THD, k_TGD, v_TGD, window) @ layer["self_attn.o_proj.weight"].T


def _convolution(kernel: Tensor, x_TGD: Tensor) -> Tensor:
    """Return kernel[previous] * x[t-1] + kernel[current] * x[t] for each head, with zero before the first token."""
    previous, current = kernel[0, 0, :, 0].unbind(1)
    return shift(x_TGD, torch.stack([current, previous], dim=1))
