"""What an attention layer remembers between two calls.

Shapes: S sequences, N cached keys of each (the newest last), G KV heads, D head size.
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

    Sequences are flushed right: the newest keys are last, and columns from before a sequence began are padding.
    Sequences of different lengths can therefore continue together. A layer with a sliding window drops keys that no
    later token can reach. Every method moves all parts at once and returns a new state.

    Attributes:
        k: keys, shifted, normalised and rotated, (S, N, G, D).
        v: values, shifted, (S, N, G, D).
        seen: how many tokens each sequence has seen, (S,) int64; the position of its next token.
        shift: the raw keys and values before the next token; None if the layer shifts nothing.
        rollback: how many tokens `crop` can take back now.
        max_rollback: that number after enough tokens, or after `reset`.
        packed: (N,), the sequence that each key belongs to (-1: none), while the keys of all sequences are in one row,
            as a call with `cu_seqlens` leaves them (k is then (1, N, G, D)). None otherwise.
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
        """S, the number of sequences."""
        return self.seen.shape[0]

    def unpack(self) -> AttentionState:
        """Give each sequence of a pack its own row. All other methods, and the layer, do this when needed.

        N becomes the length of the longest sequence. This is the one step that makes a GPU wait and
        a compiler break its graph.
        """
        if self.packed is None:
            return self
        member_SN = self.packed == torch.arange(self.sequences, device=self.packed.device).unsqueeze(1)
        longest = int(member_SN.sum(1).amax()) if member_SN.numel() else 0
        k, v = flush_right(self.k, self.v, member_SN, longest)
        return replace(self, k=k, v=v, packed=None)

    def crop(self, tokens: int) -> AttentionState:
        """Forget the last `tokens` tokens of every sequence, as after rejected drafts.

        A sequence that has seen fewer tokens is empty afterwards.

        Raises:
            ValueError: more than `rollback`.
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
        left = max(0, whole.k.shape[1] - tokens)
        shift = self.shift
        if shift is not None:  # rollback never exceeds the rows beyond those that the window needs
            shift = shift.crop(tokens, window=shift.rows - self.rollback + 1)
        return replace(
            whole,
            k=whole.k[:, :left].clone(),
            v=whole.v[:, :left].clone(),
            seen=(self.seen - tokens).clamp(min=0),
            shift=shift,
            rollback=self.rollback - tokens,
        )

    def reset(self) -> AttentionState:
        """The same S sequences, not begun."""
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


# A pytree, so that an exported program can take and return it.
torch.export.register_dataclass(AttentionState)


def flush_right(k: Tensor, v: Tensor, keep_SN: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Move the kept keys and values of each sequence to the end, in their order; zeros before them.

    Args:
        k, v: (S, N, G, D), or (1, N, G, D) where all sequences choose from one row.
        keep_SN: which to keep.
        length: how many columns to return; at least as many as any sequence keeps.
    """
    order_SN = keep_SN.long().argsort(dim=1, stable=True)[:, keep_SN.shape[1] - length :]
    kept_SN = keep_SN.gather(1, order_SN)[..., None, None]
    row_S1 = torch.arange(keep_SN.shape[0], device=keep_SN.device).unsqueeze(1)
    row_k, row_v = (x.expand(keep_SN.shape[0], -1, -1, -1)[row_S1, order_SN] for x in (k, v))
    return torch.where(kept_SN, row_k, 0), torch.where(kept_SN, row_v, 0)
