"""Sequences that are sharded over processes, and the shift by its definition, for the tests of the halo exchange."""

from __future__ import annotations

import torch
from torch import Tensor

G, H = 2, 3


def by_definition(x: Tensor, coefficients: Tensor, positions: Tensor) -> Tensor:
    """Compute y[t] = sum over j of coefficients[:, j] * x[t-j], where positions[t] >= j.

    Args:
        x: (B, T, G, D).
        coefficients: (G, W).
        positions: (B, T).
    """
    time = torch.arange(x.shape[1])
    y = torch.zeros_like(x)
    for lag in range(coefficients.shape[1]):
        reads_BTS = (time[:, None] - lag == time) & (positions[:, :, None] >= lag)
        y = y + coefficients[:, lag, None] * torch.einsum("bts,bsgd->btgd", reads_BTS.to(x.dtype), x)
    return y


def document_rows(chunk: int, chunks: int) -> list[list[int]]:
    """Return the document lengths of each row: boundaries before, on and after chunk edges, documents of length 1."""
    length, middle = chunk * chunks, chunk * (chunks // 2)
    rows = [
        [length],
        [1] * length,
        [chunk] * chunks,
        [chunk, length - chunk],
        [chunk - 1, length - chunk + 1],
        [chunk + 1, length - chunk - 1],
        [chunk - 1, 1, length - chunk],
        [chunk, 1, length - chunk - 1],
        [chunk - 1, 1, 1, length - chunk - 1],
        [middle - 1, 2, length - middle - 1],
        [length - chunk - 2, 3, chunk - 1],
        [length - 1, 1],
    ]
    return [row for row in rows if min(row) > 0]


def shard_tokens(layout: str, chunk: int, rank: int, size: int) -> Tensor:
    """Return the tokens of a sequence that a rank holds, in the order of its shard."""
    held = [rank] if layout == "contiguous" else [rank, 2 * size - 1 - rank]
    return torch.cat([torch.arange(chunk * number, chunk * (number + 1)) for number in held])
