"""Padding and documents, as the shift needs them, from the arguments that transformers' users pass.

Shapes: B batch, T positions of this call, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.utils import is_torchdynamo_compiling


def padding_mask(attention_mask: Tensor | None, positions: int) -> Tensor | None:
    """Which of the last T positions are real tokens, (B, T) bool; None if all are.

    Args:
        attention_mask: (B, length so far), 0 on padding. One of four dimensions says nothing about padding.
        positions: T.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    real_BT = attention_mask[:, attention_mask.shape[1] - positions :] != 0
    return None if _known(real_BT.all()) else real_BT


def document_index(
    batch: int,
    positions: int,
    real_BT: Tensor | None,
    *,
    seq_idx: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor | None:
    """Number the documents that share a row, (B, T); None if no row holds more than one.

    The first of these that is given decides: `seq_idx` (B, T); `cu_seq_lens` (S + 1,), boundaries in the one row of
    a pack; `position_ids` (B, T), which start anew with each document. Positions of padding count for nothing.
    """
    if seq_idx is not None:
        if tuple(seq_idx.shape) != (batch, positions):
            raise ValueError(f"seq_idx must be ({batch}, {positions}) like input_ids, got {tuple(seq_idx.shape)}")
        return seq_idx
    if cu_seq_lens is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q needs all sequences packed into one row, got a batch of {batch}")
        position_T = torch.arange(positions, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
        return torch.searchsorted(cu_seq_lens[1:].contiguous(), position_T, right=True).unsqueeze(0)
    if position_ids is None or position_ids.ndim != 2 or positions == 1:
        return None
    position_BT = position_ids.expand(batch, -1)
    if real_BT is None:
        starts_BT = position_BT.diff(dim=1) != 1
    else:
        index_T = torch.arange(positions, device=position_BT.device)
        last_real_BT = torch.where(real_BT, index_T, -1).cummax(1).values[:, :-1]
        expected_BT = position_BT.gather(1, last_real_BT.clamp(min=0)) + 1
        starts_BT = real_BT[:, 1:] & (last_real_BT >= 0) & (position_BT[:, 1:] != expected_BT)
    if _known(~starts_BT.any()):
        return None
    return torch.nn.functional.pad(starts_BT.cumsum(1), (1, 0))


def _known(condition: Tensor) -> bool:
    """Whether it holds, where it can be read: a traced graph must not depend on data."""
    return not is_torchdynamo_compiling() and not torch.jit.is_tracing() and bool(condition)
