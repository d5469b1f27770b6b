"""Negative controls: the checks of `test_decoder.py` must fail on a model with a fault.

Each fault was real, or could well have been. Those that `kvshift check` finds, too, are in `faults.py`.
"""

import functools

import pytest
import torch
from torch import Tensor

from kvshift import KVShift, ShiftState
from kvshift.models import documents
from kvshift.models.cache import ShiftCacheLayer

from . import faults
from .faults import Patch, in_state, zeros_of
from .registry import MODELS
from .test_decoder import ABSOLUTE, CHECKS


def state_written_once(patch: Patch) -> None:
    """Keep the state of the prompt."""

    def write(self: ShiftCacheLayer, state: ShiftState) -> None:
        if self.shift_state is None:
            faults.write_shift(self, state)

    patch.setattr(ShiftCacheLayer, "write_shift", write)


def crop_one_row_too_deep(patch: Patch) -> None:
    crop = ShiftState.crop
    patch.setattr(ShiftState, "crop", lambda self, tokens, *, window: crop(self, tokens + (tokens > 0), window=window))


def documents_begin_one_too_late(patch: Patch) -> None:
    index = documents.document_index

    def late(*args: object, **options: object) -> Tensor | None:
        found = index(*args, **options)
        return None if found is None else found.roll(1, 1)

    patch.setattr(documents, "document_index", late)


def keys_mixed_like_values(patch: Patch) -> None:
    mix = KVShift._mix
    patch.setattr(KVShift, "_mix", lambda self, target: mix(self, "v" if target == "k" else target))


def lags_reversed(patch: Patch) -> None:
    mix = KVShift._mix
    patch.setattr(KVShift, "_mix", lambda self, target: None if target == "q" else mix(self, target).flip(1))


def heads_reversed(patch: Patch) -> None:
    mix = KVShift._mix
    patch.setattr(KVShift, "_mix", lambda self, target: None if target == "q" else mix(self, target).flip(0))


prefill_from_zeros = in_state(lambda state, k, mask: zeros_of(state) if k.shape[1] > 1 else state)
decoding_from_zeros = in_state(lambda state, k, mask: zeros_of(state) if k.shape[1] == 1 else state)
FAULTS = {
    "state never read": (
        faults.state_never_read,
        "greedy; greedy, static; left padding; chunked prefill; every split; beams; crop; selection; assistant",
    ),
    "prefill from zeros": (
        prefill_from_zeros,
        "chunked prefill; chunked prefill, static; every split; crop; prompt lookup",
    ),
    "decoding from zeros": (decoding_from_zeros, "greedy; every split; beams; crop"),
    "state written once": (state_written_once, "greedy; chunked prefill; every split; beams"),
    "static state not written": (faults.static_state_not_written, "greedy, static; beams, static"),
    "padding ignored": (faults.padding_ignored, f"{ABSOLUTE}; right padding; chunked prefill"),
    "padding of the first columns": (faults.padding_of_the_first_columns, "chunked prefill"),
    "state at the padded end": (faults.state_at_the_padded_end, "right padding"),
    "state not moved": (faults.beams_without_state, "beams; beams, static; selection"),
    "crop keeps the newest row": (faults.rollback_keeps_the_newest_state, "crop"),
    "crop one row too deep": (crop_one_row_too_deep, "crop"),
    "documents ignored": (faults.documents_ignored, "documents"),
    "seq_idx ignored": (faults.seq_idx_ignored, "documents"),
    "documents met in attention": (faults.documents_met_in_attention, "documents; documents continued"),
    "documents met beside a cache": (faults.documents_met_beside_a_cache, "documents"),
    "documents begin one too late": (documents_begin_one_too_late, "documents"),
    "keys mixed like values": (keys_mixed_like_values, "forward; greedy"),
    "lags reversed": (lags_reversed, "forward; greedy"),
    "heads reversed": (heads_reversed, "forward; greedy"),
}
FAST = ("state never read", "padding ignored", "documents ignored", "keys mixed like values")
CASES = [
    pytest.param(name, fault, check, marks=() if name == "GPT-2" and fault in FAST else pytest.mark.slow)
    for name in ("Llama", "GPT-2")
    for fault, (_, checks) in FAULTS.items()
    for check in checks.split("; ")
    if (name, check) != ("GPT-2", ABSOLUTE)
]


@functools.cache
def assert_sound(name: str, check: str) -> None:
    """Run the check on the model without a fault, once for all faults."""
    CHECKS[check](MODELS[name](torch.float64))


@pytest.mark.parametrize(("name", "fault", "check"), CASES)
def test_the_checks_see(name: str, fault: str, check: str, monkeypatch: Patch):
    assert_sound(name, check)
    FAULTS[fault][0](monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check](MODELS[name](torch.float64))
