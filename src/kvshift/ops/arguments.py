"""The record that carries the arguments of a call from the public functions to the kernels.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvshift.ops.boundaries import ShiftPlan
from kvshift.ops.rope import Rotary

Norms = tuple[nn.Module, nn.Module]
"""Norms of queries and keys:  x / sqrt(mean(x^2) + eps) * weight  over D, as in `torch.nn.RMSNorm` and Llama."""

Gains = tuple[Tensor | None, Tensor | None, float]
"""Gains of the norms of queries and keys, (D,), and their epsilon; None for no norms."""

TENSORS = 14
"""Number of leading fields of a `Call` that the kernels read, in the order of the torch.library schemas."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


class Call(NamedTuple):
    """The arguments of a call that shifts, normalises and rotates; None for those that are absent.

    (A named tuple, because creating a dataclass takes three times as long, at every token.)

    Attributes:
        q: queries, (B, T, H, D). k: keys, (B, T, G, D). v: values, (B, T, G, Dv); None if only one tensor is shifted.
        alpha, beta: coefficients, (G, W). If None, k or v is not shifted.
        k_state, v_state: rows before each sequence, (S, R, G, D) and (S, R, G, Dv). None stands for zeros.
        cos, sin: rotary tables, as in `kvshift.ops.rope.Rotary` (for the kernels, (L, T, D/2)). If None, q and k are
            not rotated.
        q_scale, k_scale: gains of the norms, (D,), for the kernels only.
        sources, next_state, readers: fields of the `kvshift.ops.boundaries.ShiftPlan` for the following three.
        cu_seqlens, seq_idx, mask: as in `kvshift.kv_shift`.
        norms: modules applied to q and k between shift and rotation.
        eps: epsilon of the norms, for the kernels only. (torch.compile would treat a default of 0 as a varying number.)
        gamma, q_state: (H, W) and (S, R, H, D), if queries are shifted too, which takes a separate call.
        max_rows: maximum number of rows of state to keep. 0: none. None: as many as the window needs.
        backend: the backend that the caller requested.
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
        """Return `cu_seqlens`, `seq_idx` and `mask` by name."""
        return {"cu_seqlens": self.cu_seqlens, "seq_idx": self.seq_idx, "mask": self.mask}

    def rotary(self) -> Rotary | None:
        """Return both rotary tables, or None if there are none."""
        return None if self.cos is None or self.sin is None else (self.cos, self.sin)

    def plan(self) -> ShiftPlan | None:
        """Return the plan; None without boundaries."""
        if self.sources is None or self.next_state is None:
            return None
        return ShiftPlan(self.sources, self.next_state, self.readers)

    def sequences(self) -> int:
        """Return S, the number of sequences that have a state."""
        return self.k.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def state_or_zeros(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Return the rows before x, one of the tensors of the call: `state`, or zeros in its place."""
        return x.new_zeros(self.sequences(), self.window() - 1, *x.shape[2:]) if state is None else state

    def rows(self) -> int:
        """Return R, the number of rows of state; as many as the window needs if there is no state."""
        return self.window() - 1 if self.k_state is None else self.k_state.shape[1]

    def rows_to_keep(self) -> int:
        """Return the maximum number of rows of state to keep."""
        return self.window() - 1 if self.max_rows is None else self.max_rows

    def window(self) -> int:
        """Return W; 1 if nothing is shifted. (Not a property: torch.compile in 2.10 fails on those of a NamedTuple.)"""
        for coefficients in (self.beta, self.alpha, self.gamma):
            if coefficients is not None:
                return coefficients.shape[1]
        return 1
