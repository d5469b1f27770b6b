"""Definition 3.1: the induction head that Theorems 3.2 and 3.3 build.

Shapes: B sequences, L tokens, D width. Tokens count from 1 in formulas, from 0 in tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvshift import KVShiftAttention


def induction_head(x: Tensor, sigma: float, slope: float) -> Tensor:
    """Return the mean of all tokens, weighted by how similar the token *before* each is to the last one.

        IH(X) = sum_{s=2}^{L-1} w_s x_s,    w = softmax_s( <x_L, x_{s-1}> / sigma - m (L - s) )

    With [A] [B] ... [A] and a small sigma, it returns [B]. If [A] occurs several times before, an occurrence n tokens
    nearer to the end than another has e^{m n} times its weight. As m -> 0, which the paper requires, their weights
    become equal; to select "the latest", m must not be small compared with 1 / n.

    Args:
        x: (B, L, D), L >= 3.
        sigma: the temperature, above 0.
        slope: m, the slope of ALiBi, above 0.

    Returns:
        (B, D).

    Source:
        Definition 3.1. The sum ends at L - 1 by the proof of Theorem 3.2: the last token has no successor yet.
    """
    check_head(x, sigma, slope)
    length = x.shape[1]
    places = torch.arange(1, length - 1, device=x.device)  # indices of x_2 .. x_{L-1}
    distance = (length - 1 - places).to(x.dtype)  # a Python float times integers would be float32
    scores = torch.einsum("bd,bsd->bs", x[:, -1], x[:, places - 1]) / sigma - slope * distance
    return torch.einsum("bs,bsd->bd", scores.softmax(dim=1), x[:, places])


def softmax_between(scores: Tensor, first: int, last: int) -> Tensor:
    """Return the softmax of scores (B, L) over tokens first .. last (from 1, both included); other weights are 0."""
    length = scores.shape[1]
    if not 1 <= first <= last <= length:
        raise ValueError(f"first and last must satisfy 1 <= first <= last <= {length}, got {first} and {last}")
    place = torch.arange(1, length + 1, device=scores.device)
    return scores.masked_fill((place < first) | (place > last), -torch.inf).softmax(dim=1)


def random_tokens(batch: int, length: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw x ~ U(-1, 1), (B, L, D) float64."""
    return 2 * torch.rand(batch, length, width, generator=generator, dtype=torch.float64) - 1


def alibi_layer(
    query: Tensor, key: Tensor, value: Tensor, *, heads: int, head: int, **options: Any
) -> KVShiftAttention:
    """Build a `KVShiftAttention` with ALiBi in float64, whose query heads share one KV head as wide as the model.

    Args:
        query, key, value: W_Q of each head, W_K and W_V, (D, D).
        heads: H; the heads are identical except for their slope.
        head: index, from 0, of the head whose output W_O passes on.
        options: further arguments of `KVShiftAttention`.
    """
    if not 0 <= head < heads:
        raise ValueError(f"head must be from 0 to {heads - 1}, got {head}")
    width = len(key)
    layer = KVShiftAttention(width, heads, 1, head_dim=width, position_encoding="alibi", **options).double()
    with torch.no_grad():
        layer.q_proj.weight.copy_(query.repeat(heads, 1))
        layer.k_proj.weight.copy_(key)
        layer.v_proj.weight.copy_(value)
        layer.o_proj.weight.zero_()
        layer.o_proj.weight[:, head * width : (head + 1) * width] = torch.eye(width, dtype=torch.float64)
    return layer


def check_head(x: Tensor, sigma: float, slope: float) -> None:
    """Raise a ValueError that names an invalid argument of an induction head."""
    if x.ndim != 3 or x.shape[1] < 3:
        raise ValueError(f"x must be (batch, length, width) with length >= 3, got {tuple(x.shape)}")
    for name, value in (("sigma", sigma), ("slope", slope)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
