"""The state of an attention layer between two calls.

Shapes: S sequences, N cached keys per sequence (newest last), G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvshift.ops import ShiftState
from kvshift.ops.state import SequenceState


@dataclass(frozen=True, eq=False)
class AttentionState(SequenceState):
    """The cache of one `KVShiftAttention` layer for S sequences.

    Sequences are aligned to the right: the newest keys are last, and columns from before a sequence began are padding,
    so that sequences of different lengths can continue together. A layer with a sliding window drops keys that no later
    token can reach. Every method changes all parts consistently and returns a new state.

    Attributes:
        k: shifted, normalised and rotated keys, (S, N, G, D).
        v: shifted values, (S, N, G, D).
        seen: number of tokens that each sequence has seen, (S,) int64, which is the position of its next token.
        shift: raw keys and values before the next token; None if the layer shifts nothing.
        rollback: number of tokens that `crop` can currently remove.
        max_rollback: value of `rollback` after enough tokens, or after `reset`.
        packed: sequence that each key belongs to, (N,), or -1 for none. After a call with `cu_seqlens`, the keys of all
            sequences are in one row and k is (1, N, G, D). None otherwise.
    """

    k: Tensor
    v: Tensor
    seen: Tensor
    shift: ShiftState | None
    rollback: int
    max_rollback: int
    packed: Tensor | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences, S."""
        return self.seen.shape[0]

    def unpack(self) -> AttentionState:
        """Give each sequence of a pack a row of its own. All other methods, and the layer, do this when needed.

        N becomes the length of the longest sequence. This is the only step that synchronises with a GPU and causes a
        graph break in torch.compile.
        """
        if self.packed is None:
            return self
        member_SN = self.packed == torch.arange(self.sequences, device=self.packed.device).unsqueeze(1)
        longest = int(member_SN.sum(1).amax()) if member_SN.numel() else 0
        k, v = flush_right(self.k, self.v, member_SN, longest)
        return replace(self, k=k, v=v, packed=None)

    def crop(self, tokens: int) -> AttentionState:
        """Remove the last `tokens` tokens of every sequence, for example after rejected drafts.

        A sequence that has seen fewer tokens is empty afterwards.

        Raises:
            ValueError: `tokens` is negative or exceeds `rollback`.
        """
        if tokens < 0:
            raise ValueError(f"tokens must be 0 or more, got {tokens}")
        if tokens > self.rollback:
            raise ValueError(
                f"cannot crop {tokens} tokens: this state can take back {self.rollback}; a layer built with "
                f"max_rollback={self.max_rollback + tokens - self.rollback} or more can. Raw keys and values that are "
                "no longer held cannot be recovered from shifted ones"
            )
        whole = self.unpack()
        remaining = max(0, whole.k.shape[1] - tokens)
        shift = self.shift
        if shift is not None:  # rollback is at most the number of rows that the window does not need
            shift = shift.crop(tokens, window=shift.rows - self.rollback + 1)
        return replace(
            whole,
            k=whole.k[:, :remaining].clone(),
            v=whole.v[:, :remaining].clone(),
            seen=(self.seen - tokens).clamp(min=0),
            shift=shift,
            rollback=self.rollback - tokens,
        )

    def reset(self) -> AttentionState:
        """Return the state of the same S sequences before their first token."""
        return replace(
            self,
            k=self.k.new_zeros(self.sequences, 0, *self.k.shape[2:]),
            v=self.v.new_zeros(self.sequences, 0, *self.v.shape[2:]),
            seen=torch.zeros_like(self.seen),
            shift=None if self.shift is None else self.shift.reset(),
            rollback=self.max_rollback,
            packed=None,
        )

    def _map(self, fn: Callable[[Tensor], Tensor]) -> AttentionState:
        return super()._map(fn) if self.packed is None else self.unpack()._map(fn)


# A pytree, so that exported programs can take and return it.
torch.export.register_dataclass(AttentionState)


def flush_right(k: Tensor, v: Tensor, keep_SN: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Move the kept keys and values of each sequence to the end, in their order, and zero the columns before them.

    Args:
        k, v: (S, N, G, D), or (1, N, G, D) if all sequences select from one row.
        keep_SN: mask of the keys and values to keep.
        length: number of columns to return, at least as many as any sequence keeps.
    """
    order_SN = keep_SN.long().argsort(dim=1, stable=True)[:, keep_SN.shape[1] - length :]
    kept_SN = keep_SN.gather(1, order_SN)[..., None, None]
    row_S1 = torch.arange(keep_SN.shape[0], device=keep_SN.device).unsqueeze(1)
    row_k, row_v = (x.expand(keep_SN.shape[0], -1, -1, -1)[row_S1, order_SN] for x in (k, v))
    return torch.where(kept_SN, row_k, 0), torch.where(kept_SN, row_v, 0)
