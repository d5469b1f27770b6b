"""The operators as loops over sequences and positions: slow but obvious, the reference for all other implementations.

Shapes: B batch, T positions, S sequences, R rows of state, H heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kvshift.ops.arguments import compute_dtype
from kvshift.ops.rope import Rotary


def shift_reference(
    x: Tensor,
    coefficients: Tensor | None,
    state: Tensor,
    keep: int,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mix every token with those before it in its sequence.

        y[t] = coefficients[0] * x[t] + coefficients[1] * x[t-1] + ... + coefficients[W-1] * x[t-W+1]

    The tokens before the first one of a sequence are the rows of `state`, newest last. Padding is skipped.

    Args:
        x: (B, T, G, D).
        coefficients: (G, W), column j for lag j. If None, x is returned unchanged.
        state: rows before each sequence (with `cu_seqlens`) or before each batch entry (otherwise), (S, R, G, D).
        keep: number of rows of state to return, at most R plus the tokens of the shortest sequence.
        cu_seqlens: boundaries of packed sequences, (S + 1,); B is 1.
        seq_idx: number of the document at each position, (B, T). The state belongs to the first document of a row.
        mask: (B, T), False on padding.

    Returns:
        y, of the shape of x and zero on padding, and the next state: the last tokens of each sequence or, with
        `seq_idx`, of the last document of each row.
    """
    if cu_seqlens is not None:
        bounds = [int(bound) for bound in cu_seqlens]
        spans = [(0, range(start, end)) for start, end in itertools.pairwise(bounds)]
    else:
        spans = [(b, range(x.shape[1])) for b in range(x.shape[0])]

    compute = compute_dtype(x)
    weights = x.new_ones(x.shape[2], 1, dtype=compute) if coefficients is None else coefficients.to(compute)
    rows = {}
    next_state = []
    for s, (b, positions) in enumerate(spans):
        seen = list(state[s])  # the raw rows so far, newest last
        document = None
        for t in positions:
            if mask is not None and not mask[b, t]:
                rows[b, t] = torch.zeros_like(x[b, t])
                continue
            if seq_idx is not None and document is not None and int(seq_idx[b, t]) != document:
                seen = [torch.zeros_like(row) for row in state[s]]
            document = None if seq_idx is None else int(seq_idx[b, t])
            seen.append(x[b, t])
            y = _add(None, weights[:, 0, None], seen[-1].to(compute))
            for lag in range(1, weights.shape[1]):
                y = _add(y, weights[:, lag, None], seen[-1 - lag].to(compute))
            rows[b, t] = y.to(x.dtype)
        next_state.append(torch.stack(seen[len(seen) - keep :]))

    new_state = torch.stack(next_state) if next_state else state.new_zeros(0, keep, *state.shape[2:])
    if coefficients is None:
        return x, new_state
    y = [rows[b, t] for b in range(x.shape[0]) for t in range(x.shape[1])]
    return torch.stack(y).reshape(x.shape) if y else x.clone(), new_state


def norm_rope_reference(x: Tensor, scale: Tensor | None, eps: float, rotary: Rotary | None) -> Tensor:
    """Normalise every head of every token by its root mean square, then apply the rotary embedding.

        y = x / sqrt(mean(x^2) + eps) * scale                    over D
        z[i] = y[i] * cos[i] - y[i + D/2] * sin[i]               for the first half
        z[i + D/2] = y[i + D/2] * cos[i] + y[i] * sin[i]         for the second

    Args:
        x: (B, T, H, D).
        scale: gain of the norm, (D,). If None, x is not normalised.
        eps: epsilon of the norm.
        rotary: cosine and sine, (L, T, 1, D/2), or (L, T, 1, D) with the first half of the sine negated; L is B or 1.
            If None, x is not rotated.

    Returns:
        z, of the shape and dtype of x, rounded once.
    """
    compute = compute_dtype(x)
    heads = []
    for b, t, h in itertools.product(*map(range, x.shape[:3])):
        y = x[b, t, h].to(compute)
        if scale is not None:
            y = y / torch.sqrt((y * y).mean() + eps) * scale.to(compute)
        if rotary is not None:
            y = _rotated(y, *(table[b if table.shape[0] > 1 else 0, t, 0].to(compute) for table in rotary))
        heads.append(y.to(x.dtype))
    return torch.stack(heads).reshape(x.shape) if heads else x.clone()


def _rotated(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = y.shape[0] // 2
    if cos.shape[0] == half:
        cos, sin = torch.cat([cos, cos]), torch.cat([-sin, sin])
    low, high = y[:half], y[half:]
    return torch.cat([low * cos[:half] + high * sin[:half], high * cos[half:] + low * sin[half:]])


def _add(y: Tensor | None, weight: Tensor, row: Tensor) -> Tensor:
    """Return y + weight * row. Where weight is zero, add nothing, not even 0 * infinity or the sign of a zero.

    The derivative with respect to such a weight is still the row, or zero where the row is not finite.
    """
    zero = weight == 0
    product = weight * torch.where(zero & ~row.isfinite(), 0, row)
    nothing = product.detach() - product
    if y is None:
        return torch.where(zero, 0 - nothing, product)
    return torch.where(zero, y - nothing, y + product)
