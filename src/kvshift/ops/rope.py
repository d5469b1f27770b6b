"""Rotary embedding from tables, in the two common forms.

Shapes: B batch, T positions, H heads, D head size. L is B, or 1 if all sequences share the tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvshift.ops.memory import PLAIN_TENSOR_TYPES

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine tables, (L, T, 1, D) for `rotate_half` or (L, T, 1, D/2) for `rotate`."""


def rotate(x_BTHD: Tensor, table: Rotary) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by the i-th angle (Llama's split-half form), rounding once."""
    cos, sin = table
    x1, x2 = x_BTHD.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x_BTHD.dtype)


def half_tables(cos: Tensor, sin: Tensor) -> Rotary:
    """Convert the tables of Hugging Face models, (L, T, D), to those of `rotate_half`, (L, T, 1, D)."""
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(2), torch.cat([-first, second], dim=-1).unsqueeze(2)


def rotate_half(x_BTHD: Tensor, table: Rotary) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by the i-th angle, bit-identical to `apply_rotary_pos_emb` of transformers.

    y = x * cos + (x[D/2:], x[:D/2]) * sin        where the first half of sin is negated
    """
    cos, sin = table
    y, rolled = x_BTHD * cos, x_BTHD.roll(cos.shape[-1] // 2, dims=-1)
    # A product must not be rounded to a smaller dtype, and subclasses may not write to other tensors.
    if rolled.dtype != y.dtype or not all(type(x) in PLAIN_TENSOR_TYPES for x in (x_BTHD, cos, sin)):
        return y + rolled * sin
    return y.add_(rolled.mul_(sin))  # in place: half the time on a CPU, two fewer temporaries everywhere


def apply_rotary(x_BTHD: Tensor, table: Rotary) -> Tensor:
    """Apply `rotate_half` with tables as wide as a head, and `rotate` with tables half as wide."""
    return (rotate_half if table[0].shape[-1] == x_BTHD.shape[-1] else rotate)(x_BTHD, table)
