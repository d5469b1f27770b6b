"""Documents and padding, as shift and attention need them, derived from the arguments of a model's `forward`.

`create_masks` derives all of them, once per forward pass.

Shapes: B batch, T positions of this call, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils import is_torchdynamo_compiling

from kvshift.models.cache import compact_padding, counts_padding, stored_document_offset
from kvshift.models.configuration import ShiftConfig
from kvshift.models.versions import CACHE
from kvshift.ops.boundaries import document_starts, sequence_of_positions
from kvshift.ops.shift import check_cu_seqlens
from kvshift.ops.torch_ops import is_exporting

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Mask function of transformers: whether a query sees a key, given the indices of batch entry, head, query and key."""

_UNSEEN = -1000.0  # exp of any smaller number is 0 in every dtype


def create_masks(
    config: ShiftConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Cache | None,
    position_ids: Tensor | None,
    *,
    seq_idx: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """Create the masks of attention, padding and documents that all layers use.

    Args:
        attention_mask: (B, length so far), 1 on tokens and 0 on padding; further columns have no effect. Or a 4D mask
            (see `pair_structure`), which then alone decides what attention sees: documents given by other arguments
            must agree with it.

    Returns:
        A dict. "attention": the mask of the attention scores; if `config.layer_types` has several types, one such mask
        under the name of each type instead. For the shift, "padding": (B, T), False on padding, and "documents":
        (B, T), document numbers. "offsets": (B, T), index of the first token of each position's document, from which
        positions are counted; with a 4D mask alone, they are counted as in the model without shift. A value is None
        if it is not needed.
    """
    attention = str(config._attn_implementation)  # once: a look-up in a configuration takes microseconds
    check_mask(attention_mask, attention)
    batch, positions = inputs_embeds.shape[:2]
    if attention_mask is not None and attention_mask.ndim == 4:
        padding, documents = pair_structure(attention_mask, batch, positions, _num_cached_tokens(past_key_values))
        _require_keys_of_cache(attention_mask, past_key_values)
        named = document_index(batch, positions, padding, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens)
        if seq_idx is not None or cu_seq_lens is not None:
            _require(
                (_document_numbers(named, inputs_embeds) == _document_numbers(documents, inputs_embeds)).all(),
                "attention_mask of four dimensions must separate exactly the documents of seq_idx or cu_seq_lens_q",
            )
        if attention_mask.dtype == torch.bool and attention != "sdpa":
            # Eager attention adds the mask to the scores: it would add 1 where a bool mask is True.
            scores = inputs_embeds.new_zeros(attention_mask.shape)
            attention_mask = scores.masked_fill(attention_mask.logical_not(), torch.finfo(scores.dtype).min)
    else:
        attention_mask = _of_tokens_so_far(attention_mask, batch, positions, past_key_values)
        padding = padding_mask(attention_mask, positions, past_key_values)
        documents = named = document_index(
            batch, positions, padding, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens, position_ids=position_ids
        )
    begun = None if past_key_values is None else stored_document_offset(past_key_values)
    offsets, seen = None, 0
    if named is not None or begun is not None:
        seen = _num_cached_tokens(past_key_values)
        offsets = document_offsets(_document_numbers(named, inputs_embeds), seen, begun)
    if attention.startswith("flash_attention"):
        check_flash_documents(
            documents,
            batch=batch,
            begun=begun,
            not_padding_BT=padding,
            position_ids=position_ids,
            seen=_num_cached_tokens(past_key_values),
        )
    layer_types = sorted(set(config.layer_types))
    tokens: dict[str, Any] = {"attention_mask": attention_mask, "and_mask_function": same_document(offsets, seen)}
    windows = tokens
    if any("sliding" in layer_type for layer_type in layer_types):
        windows = _tokens_of_windows(config, attention_mask, past_key_values, padding, offsets, seen) or tokens
    by_type = {
        layer_type: (create_sliding_window_causal_mask if "sliding" in layer_type else create_causal_mask)(
            config=config,
            inputs_embeds=inputs_embeds,
            position_ids=None,  # transformers would derive documents from them, but not with a cache or a mask
            **{CACHE: past_key_values},
            **(windows if "sliding" in layer_type else tokens),
        )
        for layer_type in layer_types
    }
    of_scores = by_type if len(by_type) > 1 else {"attention": next(iter(by_type.values()), None)}
    return {**of_scores, "padding": padding, "documents": documents, "offsets": offsets}


def create_token_masks(
    inputs_embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, **named: Tensor | None
) -> dict[str, Tensor | None]:
    """Create the masks of `create_masks` for a call without a cache, except "attention", which is None.

    Args:
        attention_mask: (B, T), 1 on tokens and 0 on padding.
        named: seq_idx and cu_seq_lens, as in `document_index`.
    """
    batch, positions = inputs_embeds.shape[:2]
    attention_mask = _of_tokens_so_far(attention_mask, batch, positions, None)
    padding = padding_mask(attention_mask, positions)
    documents = document_index(batch, positions, padding, position_ids=position_ids, **named)
    offsets = None if documents is None else document_offsets(documents, 0, None)
    return {"attention": None, "padding": padding, "documents": documents, "offsets": offsets}


def _of_tokens_so_far(attention_mask: Tensor | None, batch: int, positions: int, cache: Cache | None) -> Tensor | None:
    """Return the columns of a mask of two dimensions up to the last token of this call.

    Transformers does not read further ones, as in a mask that has the width of a static cache from the start. (Compiled
    calls with a static cache get them all: a traced graph must not depend on data.)

    Raises:
        ValueError: the mask has other rows, or lacks a column for a token; in compiled calls with a static cache, a
            missing column is a RuntimeError.
    """
    if attention_mask is None or is_exporting():
        return attention_mask
    rows, columns = attention_mask.shape
    seen = _num_cached_tokens(cache)
    if isinstance(seen, Tensor):
        if torch.compiler.is_compiling() and rows == batch:
            _require(seen + positions <= columns, "attention_mask must have a column for every token so far")
            return attention_mask
        seen = int(seen)
    if rows != batch or columns < seen + positions:
        raise ValueError(
            f"attention_mask must be ({batch}, {seen + positions}), {seen} tokens in the cache and {positions} new "
            f"ones, got {tuple(attention_mask.shape)}"
        )
    return attention_mask if columns == seen + positions else attention_mask[:, : seen + positions]


def _require_keys_of_cache(attention_mask: Tensor, cache: Cache | None) -> None:
    """Raise a ValueError if a 4D mask does not have as many keys as the queries see in each layer of the cache."""
    for i in range(0 if cache is None else len(cache.layers)):
        held, _ = cache.get_mask_sizes(attention_mask.shape[2], i)  # type: ignore[union-attr]
        if held != attention_mask.shape[3]:
            raise ValueError(
                f"attention_mask of four dimensions must have {held} keys, as many as layer {i} has with this "
                f"cache, got {attention_mask.shape[3]}; a layer with a sliding window keeps no earlier ones"
            )


def _tokens_of_windows(
    config: Any,
    attention_mask: Tensor | None,
    cache: Cache | None,
    padding: Tensor | None,
    offsets: Tensor | None,
    seen: int | Tensor,
) -> dict[str, Any] | None:
    """Return the arguments for the mask of sliding-window layers; None if they are the same as for other layers.

    They differ where padding follows a token: a window counts tokens, not the padding between them.
    """
    if attention_mask is None or attention_mask.ndim == 4:
        return None
    is_compiled = cache is not None and padding is not None and torch.compiler.is_compiling()
    if is_compiled and counts_padding(cache, attention_mask.shape[1]):
        _require(
            ~_has_gap(attention_mask, offsets, _num_cached_tokens(cache), padding.shape[1]),
            "attention_mask must have no padding between tokens: the sliding window of a compiled call counts it",
        )
    real = tokens_with_gaps(attention_mask) if cache is None else compact_padding(cache, attention_mask, padding)
    if real is None:
        return None
    if cache is not None and offsets is not None:
        offsets = offsets_without_gaps(offsets, attention_mask, seen)
    return {
        "attention_mask": real,
        "and_mask_function": same_document(offsets, seen),
        "or_mask_function": within_window(real, config.sliding_window),
    }


def _has_gap(attention_mask: Tensor, offsets: Tensor | None, seen: int | Tensor, positions: int) -> Tensor:
    """Return whether padding lies between two tokens of the document of any of this call's tokens, a bool ()."""
    counts = torch.nn.functional.pad(_resumes(attention_mask != 0), (1, 0)).cumsum(1)  # (B, length)
    index_T = seen + torch.arange(positions, device=counts.device)
    before = 0 if offsets is None else counts.gather(1, offsets)
    return (counts.index_select(1, index_T) > before).any()


def _document_numbers(documents: Tensor | None, inputs_embeds: Tensor) -> Tensor:
    """Return the document number of each position, (B, T): `documents`, or zeros if it is None."""
    return inputs_embeds.new_zeros(inputs_embeds.shape[:2], dtype=torch.long) if documents is None else documents


def _num_cached_tokens(cache: Cache | None) -> int | Tensor:
    return 0 if cache is None else cache.get_seq_length()


def check_mask(attention_mask: Any, attn_implementation: str) -> None:
    """Raise a TypeError or ValueError for an attention mask that does not determine padding and documents."""
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            "attention_mask must be a tensor (batch, tokens so far), 1 on tokens and 0 on padding, or one of four "
            f"dimensions, (batch, heads or 1, queries, keys); got {type(attention_mask).__name__}, from which KV shift "
            "cannot tell which token precedes which"
        )
    if attention_mask.ndim not in (2, 4):
        raise ValueError(
            "attention_mask must have two dimensions, (batch, tokens so far), or four, (batch, heads or 1, queries, "
            f"keys); got {tuple(attention_mask.shape)}"
        )
    if attention_mask.ndim == 4 and attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"attention_mask must have two dimensions with attn_implementation={attn_implementation!r}: only eager "
            "and sdpa support four"
        )


def padding_mask(attention_mask: Tensor | None, positions: int, cache: Cache | None = None) -> Tensor | None:
    """Return which of this call's T positions are real tokens, (B, T) bool; None if all are.

    Args:
        attention_mask: (B, length so far), 1 or True on tokens, 0 or False on padding.
        positions: T.
        cache: the cache of the call. In compiled calls with a static cache, the mask may have further columns.

    Raises:
        ValueError: the mask holds other numbers, such as document numbers.
    """
    if attention_mask is None:
        return None
    if torch.compiler.is_compiling() and isinstance(seen := _num_cached_tokens(cache), Tensor):
        latest_BT = attention_mask.index_select(1, seen + torch.arange(positions, device=seen.device))
    else:
        latest_BT = attention_mask[:, attention_mask.shape[1] - positions :]
    not_padding_BT = latest_BT == 1
    if _true_unless_tracing(not_padding_BT.all()):
        return None
    if latest_BT.dtype != torch.bool:
        _require(
            (not_padding_BT | (latest_BT == 0)).all(),
            "attention_mask must be 1 on tokens and 0 on padding, got other numbers: mark documents that share a row "
            "with seq_idx, cu_seq_lens_q or position_ids",
        )
    return not_padding_BT


def pair_structure(
    attention_mask: Tensor, batch: int, positions: int, seen: int | Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Derive padding and documents from a 4D mask that says which token sees which.

    The shift mixes a token with the token before it if it sees that token. Positions that do not see themselves
    are padding and are skipped.

    Args:
        attention_mask: (B or 1, H or 1, T, length). A query sees a key where a bool mask is True, or where a mask that
            is added to the scores is above -1000.
        batch, positions: B and T.
        seen: number of tokens in each row before this call.

    Returns:
        The same two tensors as `padding_mask` and `document_index`.

    Raises:
        TypeError, ValueError: the mask has a wrong dtype or shape.
        ValueError: the mask does not determine documents: the heads differ in whether a token sees the previous one,
            or a token sees earlier tokens but not the last of them, as in a tree of drafts.
    """
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise TypeError(
            f"attention_mask of four dimensions must be bool, True where a query sees a key, or of floating point, to "
            f"be added to the scores; got {attention_mask.dtype}"
        )
    of_batch, _, queries, keys = attention_mask.shape
    if of_batch not in (1, batch) or queries != positions or keys < positions:
        raise ValueError(
            f"attention_mask of four dimensions must be ({batch} or 1, heads or 1, {positions}, tokens so far) for "
            f"these input_ids, got {tuple(attention_mask.shape)}"
        )
    sees = attention_mask if attention_mask.dtype == torch.bool else attention_mask > _UNSEEN
    by_any, by_all = sees.any(1), sees.all(1)
    device = attention_mask.device
    index_T = torch.arange(positions, device=device)
    begin = torch.as_tensor(seen, device=device).clamp(max=keys - positions)  # column of this call's first key
    column_T1 = (begin + index_T).unsqueeze(1)

    def at(pairs: Tensor, column: Tensor) -> Tensor:
        return pairs.gather(2, column.clamp(min=0).expand(of_batch, -1, -1)).squeeze(2)

    not_padding_BT = at(by_any, column_T1)
    last_BT = torch.where(not_padding_BT, index_T, -1).cummax(1).values
    before_BT = torch.nn.functional.pad(last_BT[:, :-1], (1, 0), value=-1)  # -1: the last token of the cache
    column_BT1 = (begin + before_BT).unsqueeze(2)
    sees_last_BT, all_see_last_BT = (at(pairs, column_BT1) for pairs in (by_any, by_all))
    has_last_BT = (before_BT >= 0) | (begin > 0)
    begins_BT = not_padding_BT & ~(has_last_BT & sees_last_BT)
    earlier_BTK = by_any & (torch.arange(keys, device=device) < column_T1)
    is_padding_BK = torch.zeros_like(by_any[:, 0]).scatter(1, (begin + index_T).expand(of_batch, -1), ~not_padding_BT)
    wrong_BT = (
        (begins_BT & (earlier_BTK.any(2) | ((begin > 0) & (before_BT < 0))))
        | (has_last_BT & (sees_last_BT != all_see_last_BT))
        | ~at(by_all, column_T1)
    )
    _require(
        ~((not_padding_BT & wrong_BT).any() | (by_any & is_padding_BK.unsqueeze(1)).any()),
        "attention_mask of four dimensions must let every token see itself and either the token before it or no "
        "earlier token, in all heads alike: KV shift mixes a token with the one before it, or with none. A document "
        "cannot begin with the first token after a cache. A position that does not see itself is padding, which no "
        "token may see",
    )
    padding = None if _true_unless_tracing(not_padding_BT.all()) else not_padding_BT.expand(batch, -1)
    documents_BT = begins_BT & (before_BT >= 0)
    return padding, None if _true_unless_tracing(~documents_BT.any()) else documents_BT.cumsum(1).expand(batch, -1)


def document_index(
    batch: int,
    positions: int,
    not_padding_BT: Tensor | None,
    *,
    seq_idx: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor | None:
    """Number the documents in each row from 0, (B, T); return None if no row holds more than one.

    The first of these arguments that is given decides. `seq_idx` (B, T): a document begins where it changes.
    `cu_seq_lens` (S + 1,): boundaries in the single row of a pack, checked as `kvshift.kv_shift` checks cu_seqlens.
    `position_ids` (B, T) or (1, T): a document begins wherever they do not increase by one. Padding is ignored; they
    may count it or not.
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
    starts_BT = document_starts(named_BT, not_padding_BT, step=step)
    return None if _true_unless_tracing(~starts_BT.any()) else starts_BT.cumsum(1)


def document_offsets(documents: Tensor, seen: int | Tensor, begun: Tensor | None) -> Tensor:
    """Return the index of the first token of each position's document, (B, T), counted from the start of the row.

    Args:
        documents: (B, T), numbers from `document_index`; number 0 continues the last document before this call.
        seen: number of tokens in each row before this call.
        begun: (B,), index of the first token of the last document before this call; None for 0.
    """
    index_T = torch.arange(documents.shape[1], device=documents.device)
    changes_BT = torch.nn.functional.pad(documents.diff(dim=1) != 0, (1, 0))
    start_BT = torch.where(changes_BT, index_T, 0).cummax(1).values + seen
    before_B1 = torch.zeros_like(documents[:, :1]) if begun is None else begun.unsqueeze(1)
    return torch.where(documents == 0, before_B1, start_BT)


def tokens_with_gaps(attention_mask: Tensor) -> Tensor | None:
    """Return which tokens are real, (B, length) bool, if a row has padding between two tokens; else None."""
    real = attention_mask != 0
    return None if _true_unless_tracing(~_resumes(real).any()) else real


def _resumes(real: Tensor) -> Tensor:
    """Return where, from the second position on, a token follows padding that follows a token, (B, length - 1)."""
    return real[:, 1:] & ~real[:, :-1] & (real.cumsum(1)[:, :-1] > 0)


def offsets_without_gaps(offsets: Tensor, attention_mask: Tensor, seen: int | Tensor) -> Tensor:
    """Return `offsets` (B, T) of `document_offsets` as they are once padding among the `seen` tokens is in front."""
    padding = (attention_mask == 0) & (torch.arange(attention_mask.shape[1], device=offsets.device) < seen)
    after = padding.flip(1).cumsum(1).flip(1)  # number of padding positions at or after each
    return offsets + after.gather(1, offsets)


def check_flash_documents(
    documents: Tensor | None,
    *,
    batch: int,
    begun: Tensor | None,
    not_padding_BT: Tensor | None,
    position_ids: Tensor | None,
    seen: int | Tensor,
) -> None:
    """Raise a ValueError for documents that flash attention would not separate: it takes boundaries, but no 4D mask.

    Transformers passes it the boundaries of one row without padding: unless all `position_ids` increase by one, a
    document begins wherever they are 0. Of keys in a cache it does not say to which document they belong.

    Args:
        documents: numbers from `document_index`, derived from all arguments.
        batch: B.
        begun: as in `document_offsets`.
        not_padding_BT, position_ids: real tokens and positions of the call.
        seen: number of tokens in each row before this call.
    """
    message = (
        "flash attention separates documents only within one unpadded row, where position_ids restart at 0, and "
        "not if a cache continues it: set attn_implementation to sdpa or flex_attention"
    )
    if begun is not None:
        _require((begun == 0).all(), message)
    one_document = documents is None or (documents == documents[:, :1]).all()
    if batch != 1:
        separates = one_document
    else:
        separates = follow = True
        if position_ids is not None and position_ids.shape[1] > 1:
            positions_T = position_ids[0]
            follow = (positions_T.diff() == 1).all()
            first_T = torch.arange(len(positions_T), device=positions_T.device) == 0
            starts_T = first_T if documents is None else first_T | (documents[0].diff(prepend=documents[0, :1]) != 0)
            restarts_T = torch.where(follow, first_T, positions_T == 0)
            separates = (starts_T == restarts_T).all()
        separates = ((seen == 0) & separates) | (one_document & follow)
        if not_padding_BT is not None:  # without a 0 in it, which compiled calls cannot know, it has no effect
            is_padded = ~not_padding_BT.all()
            separates = (is_padded | separates) & (~is_padded | one_document)
    if isinstance(separates, Tensor):
        _require(separates, message)


def same_document(offsets: Tensor | None, seen: int | Tensor) -> MaskFunction | None:
    """Return a mask function that is True for keys of the query's document; None if each row holds one document.

    It only excludes keys before the first token of the document: the causal mask excludes those after the query.

    Args:
        offsets: (B, T), from `document_offsets`.
        seen: number of tokens in each row before this call; query indices count from the start of the row.
    """
    return None if offsets is None else lambda batch, head, query, key: key >= offsets[batch, query - seen]


def within_window(real: Tensor, window: int) -> MaskFunction:
    """Return a mask function that is True for keys up to the query that are less than `window` real tokens before it.

    Args:
        real: (B, length), which tokens of the row are real.
        window: number of tokens that each token attends to, itself included.
    """
    rank = real.cumsum(1)
    return lambda batch, head, query, key: (key <= query) & (rank[batch, query] - rank[batch, key] < window)


def _check(
    batch: int, positions: int, seq_idx: Tensor | None, cu_seq_lens: Tensor | None, position_ids: Tensor | None
) -> None:
    """Raise a TypeError or ValueError that names a wrong argument of the model, its value and what is expected."""
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
    check_cu_seqlens("cu_seq_lens_q", cu_seq_lens, positions)


def _require(condition: Tensor, message: str) -> None:
    """Raise a ValueError unless `condition` holds; a RuntimeError in compiled calls, and nothing in traced programs."""
    if torch.jit.is_tracing() or is_exporting():
        return
    if is_torchdynamo_compiling():
        torch.ops.aten._assert_async.msg(condition, message)
    elif not condition:
        raise ValueError(message)


def _true_unless_tracing(condition: Tensor) -> bool:
    """Return True if `condition` holds; False in traced code, because a traced graph must not depend on data."""
    return not is_torchdynamo_compiling() and not torch.jit.is_tracing() and bool(condition)
