"""Llama with KV shift from its formulas, the reference for everything else: one sequence, no cache, no transformers.

Shapes: T positions, H query heads, G KV heads, D head size, E model width, V vocabulary, W window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.layers.attention_reference import attend, constrained, rms_norm, rotate, shift


def reference_logits(
    weights: Mapping[str, Tensor],
    config: Any,
    tokens: Sequence[int],
    attention: Callable[[Mapping[str, Tensor], Any, Tensor, int], Tensor] | None = None,
) -> Tensor:
    """Return the logits (T, V) of one document, in the dtype of the weights; differentiable.

    Args:
        weights: A state dict under the names of a checkpoint.
        config: Any object with the fields of `KVShiftLlamaConfig`.
        tokens: The document.
        attention: Another model's attention, a function of a layer's weights, the configuration, (T, E) and its number.
    """
    attention = attention or (lambda layer, config, x_TE, _: _attention(layer, config, x_TE))
    x_TE = weights["model.embed_tokens.weight"][torch.tensor(list(tokens))]
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        x_TE = x_TE + attention(layer, config, rms_norm(x_TE, layer["input_layernorm.weight"], config.rms_norm_eps), i)
        x_TE = x_TE + _mlp(layer, rms_norm(x_TE, layer["post_attention_layernorm.weight"], config.rms_norm_eps))
    x_TE = rms_norm(x_TE, weights["model.norm.weight"], config.rms_norm_eps)
    head = weights["model.embed_tokens.weight"] if config.tie_word_embeddings else weights["lm_head.weight"]
    return x_TE @ head.T


@torch.no_grad()
def reference_greedy(weights: Mapping[str, Tensor], config: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Return the `new_tokens` likeliest tokens after the prompt, each computed from scratch."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(reference_logits(weights, config, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def _attention(layer: Mapping[str, Tensor], config: Any, x_TE: Tensor) -> Tensor:
    def project(letter: str, coefficients: str) -> Tensor:
        heads = _linear(layer, f"self_attn.{letter}_proj", x_TE).view(x_TE.shape[0], -1, config.head_dim)
        return shift(heads, constrained(layer.get(f"self_attn.shift.{coefficients}"), config.shift_constraint))

    q_THD, k_TGD, v_TGD = project("q", "gamma"), project("k", "alpha"), project("v", "beta")
    if config.qk_norm:
        q_THD = rms_norm(q_THD, layer["self_attn.q_norm.weight"], config.rms_norm_eps)
        k_TGD = rms_norm(k_TGD, layer["self_attn.k_norm.weight"], config.rms_norm_eps)
    base = config.rope_parameters["rope_theta"]
    heads_TE = attend(rotate(q_THD, base), rotate(k_TGD, base), v_TGD, config.sliding_window)
    return _linear(layer, "self_attn.o_proj", heads_TE)


def _mlp(layer: Mapping[str, Tensor], x_TE: Tensor) -> Tensor:
    gate = _linear(layer, "mlp.gate_proj", x_TE)
    return _linear(layer, "mlp.down_proj", gate * gate.sigmoid() * _linear(layer, "mlp.up_proj", x_TE))


def _linear(layer: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ layer[f"{name}.weight"].T
    return y + layer[f"{name}.bias"] if f"{name}.bias" in layer else y
