"""Padding and documents, as shift and attention need them, from the arguments that transformers' users pass.

Shapes: B batch, T positions of this call, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.utils import is_torchdynamo_compiling

from kvshift.ops.boundaries import document_starts, sequence_of_positions


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
    """Number the documents that share a row from 0, (B, T); None if no row holds more than one.

    The first of these that is given decides: `seq_idx` (B, T), a document begins where it changes; `cu_seq_lens`
    (S + 1,), boundaries in the one row of a pack, checked as `kvshift.kv_shift` checks cu_seqlens; `position_ids`
    (B, T) or (1, T), a document begins wherever they do not increase by one. Positions of padding count for nothing.
    """
    _check(batch, positions, seq_idx, cu_seq_lens, position_ids)
    if seq_idx is not None:
        named_BT, step = seq_idx, 0
    elif cu_seq_lens is not None:
        named_BT, step = sequence_of_positions(cu_seq_lens, positions).unsqueeze(0), 0
    elif position_ids is not None:
        named_BT, step = position_ids.expand(batch, -1), 1
    else:
        return None
    if positions <= 1:
        return None
    starts_BT = document_starts(named_BT, real_BT, step=step)
    return None if _known(~starts_BT.any()) else starts_BT.cumsum(1)


def document_start(documents: Tensor, seen: int | Tensor, begun: Tensor | None) -> Tensor:
    """Where each position's document begins, (B, T), in tokens of the whole row, those before this call included.

    Args:
        documents: (B, T), as `document_index` numbers them; number 0 continues what was last in the row.
        seen: tokens of each row before this call.
        begun: (B,), where the last of their documents began; None for 0.
    """
    index_T = torch.arange(documents.shape[1], device=documents.device)
    changes_BT = torch.nn.functional.pad(documents.diff(dim=1) != 0, (1, 0))
    start_BT = torch.where(changes_BT, index_T, 0).cummax(1).values + seen
    before_B1 = torch.zeros_like(documents[:, :1]) if begun is None else begun.unsqueeze(1)
    return torch.where(documents == 0, before_B1, start_BT)


def starts_without_gaps(starts: Tensor, attention_mask: Tensor, seen: int | Tensor) -> Tensor:
    """`starts` (B, T), as `document_start` gives them, once padding stands in front of the `seen` tokens."""
    padding = (attention_mask == 0) & (torch.arange(attention_mask.shape[1], device=starts.device) < seen)
    after = padding.flip(1).cumsum(1).flip(1)  # how much of it stands at or behind each token
    return starts + after.gather(1, starts)


def check_flash_documents(
    documents: Tensor | None,
    *,
    continues: bool,
    real_BT: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
) -> None:
    """Refuse documents that flash attention would let see each other: it reads boundaries, but no mask of pairs.

    Transformers gives it those of one row without padding, by `cu_seq_lens_q` or where `position_ids` restart.

    Args:
        documents: as `document_index` numbers them, of all that names them.
        continues: whether a document that began in the cache, after its first token, may continue in this call.
        real_BT, position_ids, cu_seq_lens: of the call.
    """
    if is_torchdynamo_compiling() or torch.jit.is_tracing():  # a traced graph must not depend on data
        return
    if documents is None:
        named = not continues
    elif continues or real_BT is not None or documents.shape[0] > 1:
        named = False
    elif cu_seq_lens is not None or position_ids is None:
        named = True
    else:
        by_positions = document_index(documents.shape[0], documents.shape[1], None, position_ids=position_ids)
        named = by_positions is not None and torch.equal(by_positions, documents)
    if not named:
        raise ValueError(
            "flash attention separates the documents of one unpadded row, named by cu_seq_lens_q or by position_ids "
            "that restart with each, and not those of several rows, of padded ones, or of a cache that continues "
            "a pack: set attn_implementation to sdpa or flex_attention for these"
        )


def same_document(start: Tensor, seen: int | Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A mask function of transformers (batch, head, query, key -> bool): keys of the query's own document.

    Causality is another mask: of the keys up to the query, those of its document are those from its start on.

    Args:
        start: (B, T), of `document_start`.
        seen: tokens of each row before this call; queries are counted from the start of the row.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key >= start[batch, query - seen]

    return sees


def within_window(real: Tensor, window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A mask function of transformers: keys up to the query that are less than `window` real tokens before it.

    Args:
        real: (B, length), which tokens of the row are real.
        window: tokens that each attends to, itself included.
    """
    rank = real.cumsum(1)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (rank[batch, query] - rank[batch, key] < window)

    return sees


def _check(
    batch: int, positions: int, seq_idx: Tensor | None, cu_seq_lens: Tensor | None, position_ids: Tensor | None
) -> None:
    """Raise a TypeError or ValueError that names the argument of the model, what it was and what it should be."""
    for name, tensor in (("seq_idx", seq_idx), ("cu_seq_lens_q", cu_seq_lens), ("position_ids", position_ids)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {type(tensor).__name__}")
    if position_ids is not None and position_ids.shape not in ((batch, positions), (1, positions)):
        shape = tuple(position_ids.shape)
        raise ValueError(
            f"position_ids must be ({batch}, {positions}) like input_ids, or (1, {positions}), got {shape}"
        )
    if seq_idx is not None:
        if seq_idx.shape != (batch, positions):
            raise ValueError(f"seq_idx must be ({batch}, {positions}) like input_ids, got {tuple(seq_idx.shape)}")
        if seq_idx.is_floating_point() or seq_idx.dtype == torch.bool:
            raise TypeError(f"seq_idx must be of an integer dtype, got {seq_idx.dtype}")
    if cu_seq_lens is None:
        return
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q needs all sequences packed into one row, got a batch of {batch}")
    if cu_seq_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seq_lens_q must be of dtype torch.int32 or torch.int64, got {cu_seq_lens.dtype}")
    if cu_seq_lens.ndim != 1 or len(cu_seq_lens) == 0:
        raise ValueError(f"cu_seq_lens_q must be (sequences + 1,), got {tuple(cu_seq_lens.shape)}")
    if is_torchdynamo_compiling() or torch.jit.is_tracing():
        return
    rises = (cu_seq_lens[0] == 0) & (cu_seq_lens[-1] == positions) & (cu_seq_lens.diff() >= 0).all()
    message = f"cu_seq_lens_q must rise from 0 to {positions}, the positions of input_ids, without falling"
    if not cu_seq_lens.is_cpu:
        torch.ops.aten._assert_async.msg(rises, message)  # no wait for the device
    elif not rises:
        raise ValueError(f"{message}; got {cu_seq_lens.tolist()}")


def _known(condition: Tensor) -> bool:
    """Whether it holds, where it can be read: a traced graph must not depend on data."""
    return not is_torchdynamo_compiling() and not torch.jit.is_tracing() and bool(condition)
