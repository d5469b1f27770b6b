"""Negative controls: for each way to get the operator wrong, a named check that notices.

The checks are those that the tests call. That they pass on the real implementation is what all other tests say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from . import checks, mutants
from .cases import random_case
from .rounding import assert_within_one_rounding

PACK = random_case(2, lengths=checks.LENGTHS, rows=1)
ROWS = random_case(3, rows=1)


def check_parity(case: Any = ROWS) -> None:
    assert_within_one_rounding(case, "eager", through_state=True)


def check_packs() -> None:
    checks.check_pack_is_its_sequences(PACK, "eager", checks.LENGTHS)


def check_pieces() -> None:
    checks.check_pieces_are_the_whole(ROWS, "eager", [3, 7])


def check_padding(masks: tuple = ((0, 1, 1, 1), (1, 1, 1, 1), (1, 1, 0, 0)), pad: float = 31.0) -> None:
    checks.check_padding_is_as_if_absent("eager", masks, 1, pad)


def check_numbered_documents() -> None:
    case = random_case(5, 1, 5, seq_idx=[[0, 0, 1, 1, 1]])
    checks.check_documents_do_not_touch(case, "eager", [slice(0, 2), slice(2, 5)], -29.0)


def check_identity() -> None:
    keys = torch.tensor([torch.inf, -0.0, 3.0]).reshape(1, 3, 1, 1).expand(2, 3, 3, 5)
    checks.check_identity_returns_every_bit(replace(random_case(5, 2, 3), k=keys, v=keys), "eager")


def check_crop() -> None:
    checks.check_cropped_tokens_were_never_seen("eager", 2, 2)


CAUGHT_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], None]] = {
    mutants.state_forgotten: check_pieces,
    mutants.prefill_from_zeros: check_pieces,
    mutants.boundaries_ignored: check_packs,
    mutants.numbers_ignored: check_numbered_documents,
    mutants.decoding_by_coincidence: lambda: checks.check_pack_is_its_sequences(
        random_case(7, lengths=[3, 0, 0], rows=1), "eager", [3, 0, 0]
    ),
    mutants.no_pad_mask: check_padding,
    mutants.pads_multiplied_by_zero: lambda: check_padding(pad=torch.nan),
    mutants.pads_zeroed_but_not_skipped: lambda: check_padding(((1, 0, 1, 1), (1, 1, 0, 1))),
    mutants.state_at_the_padded_end: check_padding,
    mutants.one_token_emits_no_state: check_packs,
    mutants.no_token_loses_its_state: check_packs,
    mutants.state_not_reordered: lambda: checks.check_reordered_rows_go_on("eager"),
    mutants.state_reordered_backwards: lambda: checks.check_reordered_rows_go_on("eager"),
    mutants.crop_keeps_the_wrong_row: check_crop,
    mutants.crop_does_nothing: check_crop,
    mutants.lags_swapped: lambda: checks.check_hand_worked_values("eager"),
    mutants.heads_swapped: lambda: checks.check_hand_worked_values("eager"),
    mutants.keys_and_values_swap_coefficients: lambda: checks.check_hand_worked_values("eager"),
    mutants.coefficients_in_bf16: check_parity,
    mutants.products_rounded_too: lambda: check_parity(random_case(11, dtype=torch.bfloat16)),
    mutants.zero_times_infinity: check_identity,
    mutants.gradient_of_history_missing: check_parity,
    mutants.coefficients_gradient_without_history: check_parity,
    mutants.gradient_not_looking_ahead: check_parity,
    mutants.gradient_across_boundaries: check_packs,
    mutants.blocks_forget_their_neighbours: check_parity,
    mutants.state_is_a_view: lambda: checks.check_inputs_are_left_alone(random_case(13, rows=1), "eager"),
    mutants.keys_edited_in_place: lambda: checks.check_inputs_are_left_alone(random_case(13, rows=1), "eager"),
}


@pytest.mark.parametrize(("mutant", "check"), CAUGHT_BY.items(), ids=[mutant.__name__ for mutant in CAUGHT_BY])
def test_a_mutant_is_caught(mutant, check, monkeypatch):
    check()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
