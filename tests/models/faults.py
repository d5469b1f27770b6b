"""Faults in the cache, the state, padding and documents of a model, each put in by a MonkeyPatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift import KVShift, ShiftState
from kvshift.models import decoder, documents
from kvshift.models.cache import ShiftCacheLayer, ShiftSlidingWindowLayer, StaticShiftCacheLayer

Patch = pytest.MonkeyPatch
write_shift = ShiftCacheLayer.write_shift


def in_state(change: Callable[[ShiftState, Tensor, Tensor | None], ShiftState | None]) -> Callable[[Patch], None]:
    """Return a mutant that changes the state a call with a cache continues, given its keys (B, T, G, D) and mask."""

    def mutant(patch: Patch) -> None:
        whole = ShiftCacheLayer.shift_tokens

        def shift_tokens(self: Any, shift: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            if self.shift_state is not None:
                self.shift_state = change(self.shift_state, k, options.get("mask"))
            return whole(self, shift, q, k, v, **options)

        patch.setattr(ShiftCacheLayer, "shift_tokens", shift_tokens)

    return mutant


def zeros_of(state: ShiftState) -> ShiftState:
    q = None if state.q is None else torch.zeros_like(state.q)
    return ShiftState(torch.zeros_like(state.k), torch.zeros_like(state.v), state.max_rows, q)


state_never_read = in_state(lambda state, k, mask: zeros_of(state))  # every call begins a sequence


def state_of_another_sequence(patch: Patch) -> None:
    def write(self: ShiftCacheLayer, state: ShiftState) -> None:
        write_shift(self, state.select(torch.arange(state.sequences).roll(1)))

    patch.setattr(ShiftCacheLayer, "write_shift", write)


def state_at_the_padded_end(patch: Patch) -> None:
    """Take the state from the last column, even if it is padding."""
    forward = KVShift.forward

    def shift(self: KVShift, q: Tensor, k: Tensor, v: Tensor, **where: Any) -> tuple:
        *shifted, state = forward(self, q, k, v, **where)
        if where.get("mask") is not None:
            state = ShiftState(k[:, -1:], v[:, -1:], 1)
        return *shifted, state

    patch.setattr(KVShift, "forward", shift)


def beams_without_state(patch: Patch) -> None:
    """Reorder the keys and values of beams without their states."""

    def stay(self: ShiftCacheLayer, indices: Tensor) -> None:
        state, n = self.shift_state, len(indices)
        if state is not None and n != state.sequences:
            self.shift_state = state.select([i % state.sequences for i in range(n)])

    patch.setattr(ShiftCacheLayer, "_select_shift", stay)
    patch.setattr(StaticShiftCacheLayer, "_select_shift", stay)


def rollback_keeps_the_newest_state(patch: Patch) -> None:
    patch.setattr(ShiftState, "crop", lambda self, tokens, *, window: self)


def static_state_not_reset(patch: Patch) -> None:
    """Let a static cache keep the raw keys and values of the previous sequence when it is reset."""
    reset = StaticShiftCacheLayer.reset

    def forgetful(self: Any) -> None:
        kept = self.shift_state.clone()
        reset(self)
        self._overwrite(self.shift_state, kept)

    patch.setattr(StaticShiftCacheLayer, "reset", forgetful)


def static_state_not_written(patch: Patch) -> None:
    patch.setattr(StaticShiftCacheLayer, "_overwrite", staticmethod(lambda kept, state: None))


def padding_ignored(patch: Patch) -> None:
    """Apply the mask in attention only."""
    patch.setattr(documents, "padding_mask", lambda attention_mask, positions, cache=None: None)


def padding_of_the_first_columns(patch: Patch) -> None:
    """Take the first columns of the whole mask instead of the last ones."""
    patch.setattr(
        documents,
        "padding_mask",
        lambda mask, positions, cache=None: None if mask is None else mask[:, :positions] != 0,
    )


def documents_ignored(patch: Patch) -> None:
    patch.setattr(documents, "document_index", lambda *a, **k: None)


def documents_met_in_attention(patch: Patch) -> None:
    """Let attention cross the boundaries of documents; the shift stops there."""
    patch.setattr(documents, "same_document", lambda start, seen: lambda batch, head, query, key: key >= 0)


def documents_met_in_the_shift(patch: Patch) -> None:
    """Let the shift cross the boundaries of documents; attention stops there."""
    create = decoder.create_masks
    patch.setattr(decoder, "create_masks", lambda *a, **k: {**create(*a, **k), "documents": None})


def documents_met_beside_a_cache(patch: Patch) -> None:
    """Drop the boundaries of documents in calls with a cache, as transformers does."""
    create = decoder.create_masks

    def create_masks(config, inputs_embeds, attention_mask, past_key_values, position_ids, **named):
        given = {} if past_key_values is not None else {"position_ids": position_ids, **named}
        return create(config, inputs_embeds, attention_mask, past_key_values, given.pop("position_ids", None), **given)

    patch.setattr(decoder, "create_masks", create_masks)


def seq_idx_ignored(patch: Patch) -> None:
    index = documents.document_index

    def document_index(*given: Any, seq_idx: Tensor | None = None, **named: Any) -> Tensor | None:
        return index(*given, **named)

    patch.setattr(documents, "document_index", document_index)


def window_one_short(patch: Patch) -> None:
    """Let the cache of a sliding window keep one token too few."""
    make = ShiftSlidingWindowLayer.__init__

    def short(self: Any, window: int, **sizes: int) -> None:
        make(self, window, **{**sizes, "sliding_window": sizes["sliding_window"] - 1})

    patch.setattr(ShiftSlidingWindowLayer, "__init__", short)
