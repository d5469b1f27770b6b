"""Llama with KV shift from its formulas, the reference for everything else: one sequence, no cache, no transformers.

Shapes: T positions, H query heads, G KV heads, D head size, E model width, V vocabulary, W window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


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
    attend = attention or (lambda layer, config, x_TE, _: _attention(layer, config, x_TE))
    x_TE = weights["model.embed_tokens.weight"][torch.tensor(list(tokens))]
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        x_TE = x_TE + attend(layer, config, _rms_norm(x_TE, layer["input_layernorm.weight"], config), i)
        x_TE = x_TE + _mlp(layer, _rms_norm(x_TE, layer["post_attention_layernorm.weight"], config))
    x_TE = _rms_norm(x_TE, weights["model.norm.weight"], config)
    head = weights["model.embed_tokens.weight"] if config.tie_word_embeddings else weights["lm_head.weight"]
    return x_TE @ head.T


@torch.no_grad()
def reference_greedy(
    weights: Mapping[str, Tensor],
    config: Any,
    prompt: Sequence[int],
    new_tokens: int,
    logits: Callable[..., Tensor] = reference_logits,
) -> list[int]:
    """Return the `new_tokens` likeliest tokens after the prompt, each computed from scratch."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(logits(weights, config, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def _attention(layer: Mapping[str, Tensor], config: Any, x_TE: Tensor) -> Tensor:
    length, size = x_TE.shape[0], config.head_dim

    def project(letter: str) -> Tensor:
        return _linear(layer, f"self_attn.{letter}_proj", x_TE).view(length, -1, size)

    q_THD = shift(project("q"), coefficients(layer, config, "self_attn.shift.gamma"))
    k_TGD = shift(project("k"), coefficients(layer, config, "self_attn.shift.alpha"))
    v_TGD = shift(project("v"), coefficients(layer, config, "self_attn.shift.beta"))
    if config.qk_norm:
        q_THD = _rms_norm(q_THD, layer["self_attn.q_norm.weight"], config)
        k_TGD = _rms_norm(k_TGD, layer["self_attn.k_norm.weight"], config)
    base = config.rope_parameters["rope_theta"]
    q_THD, k_TGD = _rotate(q_THD, base), _rotate(k_TGD, base)

    group = q_THD.shape[1] // k_TGD.shape[1]  # query heads that share a KV head are adjacent
    k_THD, v_THD = k_TGD.repeat_interleave(group, dim=1), v_TGD.repeat_interleave(group, dim=1)
    rows = []
    for t in range(length):
        first = 0 if config.sliding_window is None else max(0, t + 1 - config.sliding_window)
        scores = torch.einsum("hd,thd->ht", q_THD[t], k_THD[first : t + 1]) / math.sqrt(size)
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(1), v_THD[first : t + 1]).flatten())
    return _linear(layer, "self_attn.o_proj", torch.stack(rows))


def coefficients(layer: Mapping[str, Tensor], config: Any, name: str) -> Tensor | None:
    """Return the coefficients (heads, W), or None if the target is not shifted."""
    parameter = layer.get(name)
    if parameter is None:
        return None
    if config.shift_constraint == "gate":
        return torch.cat([parameter.sigmoid(), 1 - parameter.sigmoid()], dim=1)
    return parameter.clamp(0, 1) if config.shift_constraint == "clamp" else parameter


def shift(x_TGD: Tensor, mix_GW: Tensor | None) -> Tensor:
    """Return y[t] = coefficients[0] * x[t] + coefficients[1] * x[t-1] + ..., without terms before the first token."""
    if mix_GW is None:
        return x_TGD
    mix_WG1 = mix_GW.T.unsqueeze(2)
    return torch.stack(
        [
            sum(mix_WG1[lag] * x_TGD[t - lag] for lag in range(mix_WG1.shape[0]) if t - lag >= 0)
            for t in range(x_TGD.shape[0])
        ]
    )


def _rotate(x_TGD: Tensor, base: float) -> Tensor:
    """Rotate element i of each half at position t by the angle t / base^(2i / D)."""
    length, _, size = x_TGD.shape
    frequency = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * frequency
    cos, sin = angle.cos().to(x_TGD.dtype), angle.sin().to(x_TGD.dtype)
    first, second = x_TGD[..., : size // 2], x_TGD[..., size // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _mlp(layer: Mapping[str, Tensor], x_TE: Tensor) -> Tensor:
    gate = _linear(layer, "mlp.gate_proj", x_TE)
    return _linear(layer, "mlp.down_proj", gate * gate.sigmoid() * _linear(layer, "mlp.up_proj", x_TE))


def _linear(layer: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ layer[f"{name}.weight"].T
    return y + layer[f"{name}.bias"] if f"{name}.bias" in layer else y


def _rms_norm(x: Tensor, weight: Tensor, config: Any) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
