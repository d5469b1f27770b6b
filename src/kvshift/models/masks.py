"""Which tokens attention may look at, and what the shift must know of padding and documents.

Shapes: B batch, T positions of this call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from kvshift.models.boundaries import (
    check_flash_documents,
    check_mask,
    document_index,
    document_start,
    padding_mask,
    pair_structure,
    require_same_documents,
    same_document,
    starts_without_gaps,
    tokens_with_gaps,
    within_window,
)
from kvshift.models.cache import compact_padding, kept_document_start
from kvshift.models.configuration import ShiftConfig
from kvshift.models.versions import CACHE


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
    """What every layer needs to know of padding and documents.

    Args:
        attention_mask: (B, length so far), 1 on tokens and 0 on padding; or a mask of pairs, see `pair_structure`,
            which then says alone what attention sees: documents that are named beside it must be its own.

    Returns:
        "attention": the mask of its scores; where `config.layer_types` has several types, each has one under its name
        instead. "padding": (B, T), False on padding, and "documents": (B, T), their numbers, for the shift. "starts":
        (B, T), where each position's document begins: positions count from there, but not by a mask of pairs, with
        which they count on as in the model without a shift. None where there is none.
    """
    check_mask(attention_mask, str(config._attn_implementation))
    batch, positions = inputs_embeds.shape[:2]
    of_pairs = attention_mask is not None and attention_mask.ndim == 4
    if attention_mask is not None and of_pairs:
        padding, documents = pair_structure(attention_mask, batch, positions, _tokens_in(past_key_values))
        for i in range(0 if past_key_values is None else len(past_key_values.layers)):
            held, _ = past_key_values.get_mask_sizes(positions, i)  # type: ignore[union-attr]
            if held != attention_mask.shape[3]:
                raise ValueError(
                    f"attention_mask of four dimensions must have {held} keys, as many as layer {i} gives its queries "
                    f"with this cache, got {attention_mask.shape[3]}; a layer of a sliding window holds no others"
                )
        if attention_mask.dtype == torch.bool and config._attn_implementation != "sdpa":
            # Eager attention adds a mask to the scores: it would add 1 where it is True.
            scores = inputs_embeds.new_zeros(attention_mask.shape)
            attention_mask = scores.masked_fill(attention_mask.logical_not(), torch.finfo(scores.dtype).min)
        named = document_index(batch, positions, padding, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens)
        if seq_idx is not None or cu_seq_lens is not None:
            require_same_documents(named, documents)
    else:
        padding = padding_mask(attention_mask, positions)
        documents = named = document_index(
            batch, positions, padding, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens, position_ids=position_ids
        )
    begun = None if past_key_values is None else kept_document_start(past_key_values)
    starts, of_own_document = None, None
    seen: int | Tensor = 0
    if named is not None or begun is not None:
        seen = _tokens_in(past_key_values)
        numbers = inputs_embeds.new_zeros(batch, positions, dtype=torch.long) if named is None else named
        starts = document_start(numbers, seen, begun)
        of_own_document = same_document(starts, seen)
    if str(config._attn_implementation).startswith("flash_attention"):
        check_flash_documents(
            documents, batch=batch, continues=begun is not None, real_BT=padding, position_ids=position_ids
        )
    layer_types = sorted(set(config.layer_types))
    all_tokens: dict[str, Any] = {"attention_mask": attention_mask, "and_mask_function": of_own_document}
    windows = all_tokens
    if any("sliding" in layer_type for layer_type in layer_types) and attention_mask is not None and not of_pairs:
        if past_key_values is None:
            real, moved = tokens_with_gaps(attention_mask), starts
        else:
            real, moved = compact_padding(past_key_values, attention_mask, padding), starts
            if real is not None and starts is not None:
                moved = starts_without_gaps(starts, attention_mask, seen)
        if real is not None:
            windows = {
                "attention_mask": real,
                "and_mask_function": None if moved is None else same_document(moved, seen),
                "or_mask_function": within_window(real, config.sliding_window),  # type: ignore[attr-defined]
            }
    by_type = {
        layer_type: (create_sliding_window_causal_mask if "sliding" in layer_type else create_causal_mask)(
            config=config,
            inputs_embeds=inputs_embeds,
            position_ids=None,  # from which transformers would take documents, but not beside a cache or a mask
            **{CACHE: past_key_values},
            **(windows if "sliding" in layer_type else all_tokens),
        )
        for layer_type in layer_types
    }
    of_scores = by_type if len(by_type) > 1 else {"attention": next(iter(by_type.values()), None)}
    return {
        **of_scores,
        "padding": padding,
        "documents": documents,
        "starts": starts,
    }


def _tokens_in(cache: Cache | None) -> int | Tensor:
    return 0 if cache is None else cache.get_seq_length()
