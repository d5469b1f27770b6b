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
    document_index,
    document_start,
    padding_mask,
    same_document,
    starts_without_gaps,
    within_window,
)
from kvshift.models.cache import close_gaps, kept_document_start
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

    Returns:
        "attention": the mask of its scores; where `config.layer_types` has several types, each has one under its name
        instead. "padding": (B, T), False on padding, and "documents": (B, T), their numbers, for the shift. "starts":
        (B, T), where each position's document begins. None where there is none.
    """
    batch, positions = inputs_embeds.shape[:2]
    padding = padding_mask(attention_mask, positions)
    documents = document_index(
        batch, positions, padding, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens, position_ids=position_ids
    )
    begun = None if past_key_values is None else kept_document_start(past_key_values)
    starts, of_own_document = None, None
    seen: int | Tensor = 0
    if documents is not None or begun is not None:
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        numbers = inputs_embeds.new_zeros(batch, positions, dtype=torch.long) if documents is None else documents
        starts = document_start(numbers, seen, begun)
        of_own_document = same_document(starts, seen)
        if str(config._attn_implementation).startswith("flash_attention"):
            check_flash_documents(
                documents,
                continues=begun is not None,
                real_BT=padding,
                position_ids=position_ids,
                cu_seq_lens=cu_seq_lens,
            )
    layer_types = sorted(set(config.layer_types))
    all_tokens: dict[str, Any] = {"attention_mask": attention_mask, "and_mask_function": of_own_document}
    windows, has_windows = all_tokens, any("sliding" in layer_type for layer_type in layer_types)
    if has_windows and past_key_values is not None and attention_mask is not None and attention_mask.ndim == 2:
        real = close_gaps(past_key_values, attention_mask, padding)
        if real is not None:
            moved = None if starts is None else starts_without_gaps(starts, attention_mask, seen)
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
