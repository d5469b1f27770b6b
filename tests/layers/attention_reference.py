"""Attention with KV shift from its formulas, for one sequence without a cache: the reference of layers and models.

Shapes: T positions, H query heads, G KV heads, D head size, E model width, W window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvshift import KVShiftAttention


def reference_attention(layer: KVShiftAttention, x_TE: Tensor, positions: Sequence[float] | None = None) -> Tensor:
    """Return the output of `layer` for x (T, E); differentiable."""
    length, constraint = x_TE.shape[0], layer.shift.options.constraint
    q, k, v = (
        shift(projection(x_TE).view(length, -1, layer.head_dim), constrained(parameter, constraint))
        for projection, parameter in (
            (layer.q_proj, layer.shift.gamma),
            (layer.k_proj, layer.shift.alpha),
            (layer.v_proj, layer.shift.beta),
        )
    )
    if layer.qk_norm:
        q, k = rms_norm(q, layer.q_norm.weight, 1e-5), rms_norm(k, layer.k_norm.weight, 1e-5)
    if layer.position_encoding == "rope":
        q, k = rotate(q, layer.rope_base, positions), rotate(k, layer.rope_base, positions)
    slopes = slopes_of(layer.num_heads) if layer.position_encoding == "alibi" else None
    return layer.o_proj(attend(q, k, v, layer.sliding_window, slopes))


def constrained(parameter: Tensor | None, constraint: str) -> Tensor | None:
    """Return the coefficients (heads, W) that follow from a parameter, or None if there is none."""
    if parameter is None or constraint == "free":
        return parameter
    if constraint == "clamp":
        return parameter.clamp(0, 1)
    now = parameter.sigmoid()
    return torch.cat([now, 1 - now], dim=1)


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


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x_TGD: Tensor, base: float, positions: Sequence[float] | None = None) -> Tensor:
    """Rotate elements i of both halves of each head by the angle position / base^(2i / D)."""
    length, _, size = x_TGD.shape
    position_T = torch.tensor(range(length) if positions is None else positions, dtype=torch.float64)
    frequency = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = position_T[:, None, None] * frequency
    cos, sin = angle.cos().to(x_TGD.dtype), angle.sin().to(x_TGD.dtype)
    first, second = x_TGD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, window: int | None = None, slopes: Sequence[float] | None = None
) -> Tensor:
    """Return the heads (T, H * D) of attention in which each token sees the last `window` tokens, itself included."""
    group = q_THD.shape[1] // k_TGD.shape[1]  # query heads that share a KV head are adjacent
    k_THD, v_THD = k_TGD.repeat_interleave(group, dim=1), v_TGD.repeat_interleave(group, dim=1)
    rows = []
    for t in range(q_THD.shape[0]):
        first = 0 if window is None else max(0, t + 1 - window)
        scores = torch.einsum("hd,shd->hs", q_THD[t], k_THD[first : t + 1]) / math.sqrt(q_THD.shape[2])
        if slopes is not None:
            scores = scores - torch.outer(torch.tensor(slopes).to(scores), torch.arange(t - first, -1, -1).to(scores))
        rows.append(torch.einsum("hs,shd->hd", scores.softmax(1), v_THD[first : t + 1]).flatten())
    return torch.stack(rows)


def slopes_of(heads: int) -> list[float]:
    """Return the ALiBi slopes: 2^(-8/n), 2^(-16/n), ... for n a power of two; further heads use every other of 2n."""
    n = 1
    while 2 * n <= heads:
        n *= 2
    return [2 ** (-8 / n * (h + 1)) if h < n else 2 ** (-8 / (2 * n) * (2 * (h - n) + 1)) for h in range(heads)]
