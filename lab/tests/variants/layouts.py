"""Sequences with padding and documents, and a loop that finds the predecessors in them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshift_lab.variants.mixing import Heads

HEADS = Heads(kv_heads=3, size=20, width=17, initializer_range=0.7)

# For each sequence, the document of each position, or None on padding.
ROWS = [
    [0, 0, 0, 0, 0, 0, 0],
    [None, None, 0, 0, 1, 2, 2],
    [0, 1, 1, None, 1, 1, None],
    [None, None, None, None, None, None, 0],
    [None] * 7,
]
LAYOUTS = {"whole": ROWS[:1] * 5, "documents": [[0, 0, 1, 2, 2, 2, 3]] * 5, "padding": ROWS}


def given(rows: list[list[int | None]]) -> dict[str, Tensor]:
    """Return `mask` and `seq_idx` of sequences."""
    mask = torch.tensor([[document is not None for document in row] for row in rows])
    return {"mask": mask, "seq_idx": torch.tensor([[document or 0 for document in row] for row in rows])}


def before(row: list[int | None], t: int) -> int | None:
    """Return the position of the token before t in its document, or None if there is none."""
    if row[t] is None:
        return None
    earlier = [s for s in range(t) if row[s] is not None]
    return earlier[-1] if earlier and row[earlier[-1]] == row[t] else None


def heads(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return keys and values of `HEADS` for sequences of the size of `LAYOUTS`."""
    chance = torch.Generator().manual_seed(5)
    k, v = (torch.randn(5, 7, HEADS.kv_heads, HEADS.size, generator=chance).to(dtype) for _ in "kv")
    return k, v
