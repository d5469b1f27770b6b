"""Attention with KV shift as loops over positions and heads: one sequence, directly from the formulas, in fp64.

Shapes: T positions, H query heads, G KV heads, D head size, E model width, W window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvshift import KVShift, KVShiftAttention

Rows = list[list[Tensor]]  # [position][head] -> (D,)


def reference_attention(layer: KVShiftAttention, x: Tensor, positions: Sequence[float] | None = None) -> Tensor:
    """Return the output of `layer` for x (T, E); differentiable."""
    length = x.shape[0]
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    q, k, v = (
        project(linear, x, n)
        for linear, n in ((layer.q_proj, heads), (layer.k_proj, kv_heads), (layer.v_proj, kv_heads))
    )
    q, k, v = (
        shift(rows, coefficients_of(layer.shift, name)) for rows, name in ((q, "gamma"), (k, "alpha"), (v, "beta"))
    )
    if layer.qk_norm:
        q, k = normalise(q, layer.q_norm.weight), normalise(k, layer.k_norm.weight)
    if layer.position_encoding == "rope":
        angles = range(length) if positions is None else positions
        q, k = rotate(q, angles, layer.rope_base), rotate(k, angles, layer.rope_base)

    outputs = []
    for t in range(length):
        mixed = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            first = 0 if layer.sliding_window is None else max(0, t - layer.sliding_window + 1)
            scores = []
            for s in range(first, t + 1):
                score = (q[t][h] * k[s][g]).sum() / math.sqrt(layer.head_dim)
                if layer.position_encoding == "alibi":
                    score = score - slope(h, heads) * (t - s)
                scores.append(score)
            weights = torch.stack(scores).softmax(0)
            mixed.append(sum(weight * v[s][g] for weight, s in zip(weights, range(first, t + 1), strict=True)))
        out = layer.o_proj.weight @ torch.cat(mixed)
        outputs.append(out if layer.o_proj.bias is None else out + layer.o_proj.bias)
    return torch.stack(outputs)


def project(linear: torch.nn.Linear, x: Tensor, heads: int) -> Rows:
    rows = [linear.weight @ row if linear.bias is None else linear.weight @ row + linear.bias for row in x]
    return [list(row.reshape(heads, -1)) for row in rows]


def coefficients_of(module: KVShift, name: str) -> Tensor | None:
    parameter = getattr(module, name)
    if parameter is None or module.options.constraint == "free":
        return parameter
    if module.options.constraint == "clamp":
        return parameter.clamp(0, 1)
    now = 1 / (1 + (-parameter).exp())
    return torch.cat([now, 1 - now], dim=1)


def shift(rows: Rows, coefficients: Tensor | None) -> Rows:
    if coefficients is None:
        return rows
    return [
        [
            sum(coefficients[h, lag].double() * rows[t - lag][h] for lag in range(coefficients.shape[1]) if t >= lag)
            for h in range(len(rows[t]))
        ]
        for t in range(len(rows))
    ]


def normalise(rows: Rows, gain: Tensor) -> Rows:
    return [[x / ((x * x).mean() + 1e-5).sqrt() * gain for x in row] for row in rows]


def rotate(rows: Rows, positions: Sequence[float], base: float) -> Rows:
    rotated = []
    for row, position in zip(rows, positions, strict=True):
        heads = []
        for x in row:
            half = x.shape[0] // 2
            pairs = []
            for i in range(half):
                angle = position / base ** (2 * i / x.shape[0])
                cos, sin = math.cos(angle), math.sin(angle)
                pairs.append((x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin))
            heads.append(torch.stack([pair[0] for pair in pairs] + [pair[1] for pair in pairs]))
        rotated.append(heads)
    return rotated


def slope(head: int, heads: int) -> float:
    """Return the ALiBi slope: 2^(-8/n), 2^(-16/n), ... for n a power of two; further heads use every other of 2n."""
    n = 1
    while 2 * n <= heads:
        n *= 2
    return 2 ** (-8 / n * (head + 1)) if head < n else 2 ** (-8 / (2 * n) * (2 * (head - n) + 1))
