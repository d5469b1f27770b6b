"""One call of the operator in one record, from its public face to the kernels.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvshift.ops.boundaries import ShiftPlan
from kvshift.ops.rope import Rotary

Norms = tuple[nn.Module, nn.Module]
"""Of queries and of keys:  x / sqrt(mean(x^2) + eps) * weight  over D, as in `torch.nn.RMSNorm` and in Llama's."""

TENSORS = 14
"""So many of the first fields of a `Call` are what kernels read, in the order in which torch.library is given them."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Of the arithmetic: float32; float64 for float64."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


class Call(NamedTuple):
    """What is shifted, normalised and rotated, and how; None: it is not there.

    (A tuple: a dataclass takes three times as long to make, at every token.)

    Attributes:
        q: (B, T, H, D); k: (B, T, G, D); v: (B, T, G, Dv), or None where one tensor alone is shifted.
        alpha, beta: (G, W); None: k or v is not shifted.
        k_state, v_state: (S, R, G, D) and (S, R, G, Dv), the rows before each sequence; None: zeros.
        cos, sin: tables of the rotation, `kvshift.ops.rope.Rotary` (the kernels are given (L, T, D/2)); None: q and k
            are not rotated.
        q_scale, k_scale: (D,), the gains of the norms, for the kernels alone.
        sources, next_state, readers: as in a `kvshift.ops.boundaries.ShiftPlan`, made of the following three.
        cu_seqlens, seq_idx, mask: as in `kvshift.kv_shift`.
        norms: between shift and rotation.
        eps: of the norms, for the kernels. (A default of 0 would be a number that changes to torch.compile.)
        gamma, q_state: (H, W) and (S, R, H, D): queries that are shifted too, by a call of their own.
        max_rows: how many rows of state are kept at most; 0: none; None: as many as a window needs.
        backend: as the caller named it.
    """

    q: Tensor | None
    k: Tensor
    v: Tensor | None
    alpha: Tensor | None = None
    beta: Tensor | None = None
    k_state: Tensor | None = None
    v_state: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    sources: Tensor | None = None
    next_state: Tensor | None = None
    readers: Tensor | None = None
    cu_seqlens: Tensor | None = None
    seq_idx: Tensor | None = None
    mask: Tensor | None = None
    norms: Norms | None = None
    eps: float | None = None
    gamma: Tensor | None = None
    q_state: Tensor | None = None
    max_rows: int | None = None
    backend: str = "auto"

    def boundaries(self) -> dict[str, Tensor | None]:
        """As the caller gave them, by name."""
        return {"cu_seqlens": self.cu_seqlens, "seq_idx": self.seq_idx, "mask": self.mask}

    def rotary(self) -> Rotary | None:
        """Both tables."""
        return None if self.cos is None or self.sin is None else (self.cos, self.sin)

    def plan(self) -> ShiftPlan | None:
        """None without boundaries."""
        if self.sources is None or self.next_state is None:
            return None
        return ShiftPlan(self.sources, self.next_state, self.readers)

    def rows(self) -> int:
        """R; as many as a window needs where there is no state."""
        return self.window() - 1 if self.k_state is None else self.k_state.shape[1]

    def rows_to_keep(self) -> int:
        """At most."""
        return self.window() - 1 if self.max_rows is None else self.max_rows

    def window(self) -> int:
        """W; 1 where nothing is shifted. (No property: torch.compile of 2.10 cannot compare one of a NamedTuple.)"""
        shifted = self.alpha if self.beta is None else self.beta
        return 1 if shifted is None else shifted.shape[1]
