"""Negative controls: the suite must fail on a model with a fault. Each fault was, or could well have been, real."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift import KVShift, ShiftState
from kvshift.models import decoder, documents
from kvshift.models.cache import ShiftCacheLayer, StaticShiftCacheLayer

from .checks import (
    check_beams,
    check_chunked_prefill,
    check_crop,
    check_decoding,
    check_documents,
    check_forward,
    check_left_padding,
    check_padding_without_positions,
    check_right_padding,
    check_selection,
    check_splits,
)
from .tiny import tiny_model

write_shift = ShiftCacheLayer.write_shift


def zeros_like(state: ShiftState | None) -> ShiftState | None:
    if state is None:  # before the first token
        return None
    q = None if state.q is None else torch.zeros_like(state.q)
    return ShiftState(torch.zeros_like(state.k), torch.zeros_like(state.v), state.max_rows, q)


def begin_where(patch: pytest.MonkeyPatch, forgets: Callable[[Tensor], bool]) -> None:
    """A call whose keys are such begins a sequence."""

    def shift_into(self: ShiftCacheLayer, shift: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if forgets(k):
            self.shift_state = zeros_like(self.shift_state)
        return whole(self, shift, q, k, v, **options)

    whole = ShiftCacheLayer.shift_into
    patch.setattr(ShiftCacheLayer, "shift_into", shift_into)


def no_stored_state(patch: pytest.MonkeyPatch) -> None:
    """Every call begins a sequence."""
    begin_where(patch, lambda k: True)


def prefill_from_zeros(patch: pytest.MonkeyPatch) -> None:
    """A call of several tokens begins a sequence; only single tokens continue from the state."""
    begin_where(patch, lambda k: k.shape[1] > 1)


def decoding_from_zeros(patch: pytest.MonkeyPatch) -> None:
    """A single token begins a sequence."""
    begin_where(patch, lambda k: k.shape[1] == 1)


def state_written_once(patch: pytest.MonkeyPatch) -> None:
    """The state stays that of the prompt."""

    def write(self: ShiftCacheLayer, state: ShiftState) -> None:
        if self.shift_state is None:
            write_shift(self, state)

    patch.setattr(ShiftCacheLayer, "write_shift", write)


def static_state_not_overwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StaticShiftCacheLayer, "_overwrite", staticmethod(lambda kept, state: None))


def no_padding_mask(patch: pytest.MonkeyPatch) -> None:
    """The mask reaches attention alone."""
    patch.setattr(documents, "padding_mask", lambda attention_mask, positions: None)


def padding_mask_of_the_first_columns(patch: pytest.MonkeyPatch) -> None:
    """Of the whole mask the beginning is taken, not the end."""
    patch.setattr(documents, "padding_mask", lambda mask, positions: None if mask is None else mask[:, :positions] != 0)


def state_at_the_padded_end(patch: pytest.MonkeyPatch) -> None:
    """The state is the last column, padding or not."""
    forward = KVShift.forward

    def shift(self: KVShift, q: Tensor, k: Tensor, v: Tensor, **where: object) -> tuple:
        *shifted, _ = forward(self, q, k, v, **where)
        return *shifted, ShiftState(k[:, -1:], v[:, -1:], 1)

    patch.setattr(KVShift, "forward", shift)


def state_not_moved(patch: pytest.MonkeyPatch) -> None:
    """Keys and values of a beam go to another place, its state does not."""

    def stay(self: ShiftCacheLayer, indices: Tensor) -> None:
        state, n = self.shift_state, len(indices)
        if state is not None and n != state.sequences:
            self.shift_state = state.select([i % state.sequences for i in range(n)])

    patch.setattr(ShiftCacheLayer, "_select_shift", stay)
    patch.setattr(StaticShiftCacheLayer, "_select_shift", stay)


def crop_keeps_the_newest_row(patch: pytest.MonkeyPatch) -> None:
    """Drafts are taken back from the keys; the state stays behind the last draft."""
    patch.setattr(ShiftState, "crop", lambda self, tokens, *, window: self)


def crop_one_row_too_deep(patch: pytest.MonkeyPatch) -> None:
    crop = ShiftState.crop
    patch.setattr(ShiftState, "crop", lambda self, tokens, *, window: crop(self, tokens + (tokens > 0), window=window))


def documents_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(documents, "document_index", lambda *a, **k: None)


def attention_ignores_documents(patch: pytest.MonkeyPatch) -> None:
    """The shift stops at their boundaries, attention does not."""
    patch.setattr(documents, "same_document", lambda start, seen: lambda batch, head, query, key: key >= 0)


def documents_heeded_without_a_cache_alone(patch: pytest.MonkeyPatch) -> None:
    """As in transformers."""
    create = decoder.create_masks

    def create_masks(config, inputs_embeds, attention_mask, past_key_values, position_ids, **named):
        given = {} if past_key_values is not None else {"position_ids": position_ids, **named}
        return create(config, inputs_embeds, attention_mask, past_key_values, given.pop("position_ids", None), **given)

    patch.setattr(decoder, "create_masks", create_masks)


def documents_begin_one_too_late(patch: pytest.MonkeyPatch) -> None:
    index = documents.document_index

    def late(*args: object, **options: object) -> Tensor | None:
        found = index(*args, **options)
        return None if found is None else found.roll(1, 1)

    patch.setattr(documents, "document_index", late)


def keys_mixed_like_values(patch: pytest.MonkeyPatch) -> None:
    mix = KVShift._mix
    patch.setattr(KVShift, "_mix", lambda self, target: mix(self, "v" if target == "k" else target))


def lags_reversed(patch: pytest.MonkeyPatch) -> None:
    mix = KVShift._mix
    patch.setattr(KVShift, "_mix", lambda self, target: None if target == "q" else mix(self, target).flip(1))


def heads_reversed(patch: pytest.MonkeyPatch) -> None:
    mix = KVShift._mix
    patch.setattr(KVShift, "_mix", lambda self, target: None if target == "q" else mix(self, target).flip(0))


static = {"cache_implementation": "static"}
MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], list[Callable]] = {
    no_stored_state: [
        check_decoding,
        partial(check_decoding, **static),
        check_left_padding,
        check_chunked_prefill,
        check_splits,
        check_beams,
        check_crop,
        check_selection,
    ],
    prefill_from_zeros: [check_chunked_prefill, partial(check_chunked_prefill, **static), check_splits, check_crop],
    decoding_from_zeros: [check_decoding, check_splits, check_beams, check_crop],
    state_written_once: [check_decoding, check_chunked_prefill, check_splits, check_beams],
    static_state_not_overwritten: [partial(check_decoding, **static), partial(check_beams, **static)],
    no_padding_mask: [check_padding_without_positions, check_right_padding, check_chunked_prefill],
    padding_mask_of_the_first_columns: [check_chunked_prefill],
    state_at_the_padded_end: [check_right_padding],
    state_not_moved: [check_beams, partial(check_beams, **static), check_selection],
    crop_keeps_the_newest_row: [check_crop],
    crop_one_row_too_deep: [check_crop],
    documents_ignored: [check_documents],
    attention_ignores_documents: [check_documents],
    documents_heeded_without_a_cache_alone: [check_documents],
    documents_begin_one_too_late: [check_documents],
    keys_mixed_like_values: [check_forward, check_decoding],
    lags_reversed: [check_forward, check_decoding],
    heads_reversed: [check_forward, check_decoding],
}
CASES = [(mutant, check) for mutant, checks in MUTANTS.items() for check in checks]


def name_of(check: Callable) -> str:
    return f"{check.func.__name__}(static)" if isinstance(check, partial) else check.__name__


@functools.cache
def assert_sound(check: Callable) -> None:
    """Of the model without a fault, once for all mutants."""
    check(tiny_model(torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "check"), CASES, ids=[f"{mutant.__name__}-{name_of(check)}" for mutant, check in CASES]
)
def test_the_suite_sees(mutant: Callable[[pytest.MonkeyPatch], None], check: Callable, monkeypatch: pytest.MonkeyPatch):
    assert_sound(check)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(tiny_model(torch.float64))
