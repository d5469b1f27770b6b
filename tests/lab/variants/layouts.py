"""Sequences with padding and documents, and who is whose predecessor in them, by a loop."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshift.lab.variants.mixing import Heads

HEADS = Heads(kv_heads=3, size=20, width=17, initializer_range=0.7)

# By sequence: the document of each position, None on padding.
ROWS = [
    [0, 0, 0, 0, 0, 0, 0],
    [None, None, 0, 0, 1, 2, 2],
    [0, 1, 1, None, 1, 1, None],
    [None, None, None, None, None, None, 0],
    [None] * 7,
]
LAYOUTS = {"whole": ROWS[:1] * 5, "documents": [[0, 0, 1, 2, 2, 2, 3]] * 5, "padding": ROWS}


def given(rows: list[list[int | None]]) -> dict[str, Tensor]:
    """`mask` and `seq_idx` of sequences."""
    mask = torch.tensor([[document is not None for document in row] for row in rows])
    return {"mask": mask, "seq_idx": torch.tensor([[document or 0 for document in row] for row in rows])}


def before(row: list[int | None], t: int) -> int | None:
    """The position of the token before t in its document; None where there is none."""
    if row[t] is None:
        return None
    earlier = [s for s in range(t) if row[s] is not None]
    return earlier[-1] if earlier and row[earlier[-1]] == row[t] else None


def heads(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values of `HEADS`, as many as each of `LAYOUTS` has positions."""
    chance = torch.Generator().manual_seed(5)
    k, v = (torch.randn(5, 7, HEADS.kv_heads, HEADS.size, generator=chance).to(dtype) for _ in "kv")
    return k, v
