"""Baichuan-M1 from its formulas, token by token: one sequence, no cache, no batch, weights by released names.

Shapes: T positions, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_KNOWN: dict[tuple, tuple[Mapping[str, Tensor], Tensor]] = {}


def logits(weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
    """Return the logits (T, V) of one document, in the dtype of the weights; differentiable.

    Args:
        weights: Weights of a checkpoint, by their released names.
        config: Contents of its config.json.
        tokens: The document.
    """
    eps = config["rms_norm_eps"]
    states = [weights["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        own = {key.removeprefix(name): tensor for key, tensor in weights.items() if key.startswith(name)}
        mixed = _attention(own, config, layer, [_norm(x, own["input_layernorm.weight"], eps) for x in states])
        states = [x + y for x, y in zip(states, mixed, strict=True)]
        states = [x + _mlp(own, _norm(x, own["post_attention_layernorm.weight"], eps)) for x in states]
    head = weights["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    head = head / (head.square().sum(1, keepdim=True).sqrt() + 1e-7)
    return torch.stack([head @ _norm(x, weights["model.norm.weight"], eps) for x in states])


def logits_of_state_dict(weights: Mapping[str, Tensor], config: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits for a model's state dict and configuration, after conversion of the coefficients.

    Results are cached, as long as no weight is written to.
    """
    state = tuple((tensor.data_ptr(), tensor._version) for tensor in weights.values())
    known = _KNOWN.get((state, tuple(tokens)))
    if known is not None:
        return known[1]
    kernels = {"shift.alpha": "conv_k", "shift.beta": "conv_v"}
    released = dict(weights)
    for name, tensor in weights.items():
        for ours, theirs in kernels.items():
            if name.endswith(ours):
                previous_last = torch.stack([tensor[:, 1], tensor[:, 0]], dim=1)
                released[name.replace(ours, theirs)] = previous_last.reshape(1, 1, -1, 1, 2)
    found = logits(released, config.to_dict(), tokens)
    _KNOWN[state, tuple(tokens)] = weights, found  # keep the weights, so that their memory is not reused
    return found


def _attention(
    layer: Mapping[str, Tensor], config: Mapping[str, Any], number: int, inputs: Sequence[Tensor]
) -> list[Tensor]:
    heads, kv_heads, window = config["num_attention_heads"], config["num_key_value_heads"], len(inputs)
    if number in config["sliding_window_layers"]:
        heads = config.get("num_swa_attention_heads") or heads
        kv_heads = config.get("num_swa_key_value_heads") or kv_heads
        window = config["sliding_window"]
    size = config["hidden_size"] // heads
    packed = [(layer["self_attn.W_pack.weight"] @ x).view(-1, size) for x in inputs]  # (heads, D) for each position
    queries = [x[:heads] for x in packed]
    keys = _convolution(layer["self_attn.conv_k"], [x[heads : heads + kv_heads] for x in packed])
    values = _convolution(layer["self_attn.conv_v"], [x[heads + kv_heads :] for x in packed])
    queries = [_rotate(x, t, config["rope_theta"]) for t, x in enumerate(queries)]
    keys = [_rotate(x, t, config["rope_theta"]) for t, x in enumerate(keys)]
    outputs = []
    for t in range(len(inputs)):
        seen, of_heads = range(max(0, t - window + 1), t + 1), []
        for head in range(heads):
            group = head * kv_heads // heads
            scores = torch.stack([keys[s][group] for s in seen]) @ queries[t][head] / math.sqrt(size)
            of_heads.append(scores.softmax(0) @ torch.stack([values[s][group] for s in seen]))
        outputs.append(layer["self_attn.o_proj.weight"] @ torch.cat(of_heads))
    return outputs


def _convolution(kernel: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return kernel[previous] * x[t-1] + kernel[current] * x[t] for each head, with zero before the first token."""
    previous, current = kernel[0, 0, :, 0, 0, None], kernel[0, 0, :, 0, 1, None]
    before = [torch.zeros_like(inputs[0]), *inputs[:-1]]
    return [previous * y + current * x for x, y in zip(inputs, before, strict=True)]


def _rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate the pair of elements i and i + D / 2 of each head by the angle position * theta^(-2i / D)."""
    first, second = x.chunk(2, dim=1)
    angles = position * theta ** (-2 * torch.arange(first.shape[1], dtype=torch.float64) / x.shape[1])
    c, s = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * c - second * s, second * c + first * s], dim=1)


def _mlp(layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gate = layer["mlp.gate_proj.weight"] @ x
    return layer["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (layer["mlp.up_proj.weight"] @ x))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean() + eps).sqrt()
