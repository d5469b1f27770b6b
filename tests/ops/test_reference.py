"""Small cases, with all numbers worked out by hand, against which the reference itself is tested."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshift.ops import ShiftState, kv_shift, shift_tokens

from .checks import check_hand_worked_values

TEN = torch.tensor([[1.0, 10.0]])  # the current token plus ten times the previous one
BOTH = torch.tensor([[1.0, 0.0]])


def column(*numbers: float) -> Tensor:
    """Return a sequence of tokens with one head of one number."""
    return torch.tensor(numbers, dtype=torch.float32).reshape(1, -1, 1, 1)


def test_every_result_and_gradient(backend):
    check_hand_worked_values(backend)


def test_the_paper_window_of_two(backend):
    k_hat, v_hat, state = kv_shift(column(1, 2, 3), column(4, 5, 6), TEN, BOTH, backend=backend)
    assert k_hat.flatten().tolist() == [1, 12, 23]
    assert v_hat.flatten().tolist() == [4, 5, 6]
    assert (state.k.item(), state.v.item(), state.max_rows) == (3, 6, 1)


def test_documents_begin_anew(backend):
    """The documents have lengths 2, 0, 1 and 2 and, if there is a state, the states 7, 8, 9 and 6."""
    state = ShiftState(torch.tensor([7.0, 8, 9, 6]).reshape(4, 1, 1, 1), torch.zeros(4, 1, 1, 1), 1)
    k, v = column(1, 2, 3, 4, 5), column(0, 0, 0, 0, 0)
    bounds = torch.tensor([0, 2, 2, 3, 5], dtype=torch.int32)
    k_hat, _, _ = kv_shift(k, v, TEN, BOTH, cu_seqlens=bounds, backend=backend)
    assert k_hat.flatten().tolist() == [1, 12, 3, 4, 45]
    k_hat, _, new_state = kv_shift(k, v, TEN, BOTH, state=state, cu_seqlens=bounds, backend=backend)
    assert k_hat.flatten().tolist() == [71, 12, 93, 64, 45]
    assert new_state.k.flatten().tolist() == [2, 8, 3, 5]  # the empty document passes its state through


def test_documents_by_number(backend):
    """Only the first document of a sequence continues from the state; the new state is that of the last document."""
    state = ShiftState(column(8, 7), column(0, 0), 2)
    numbers = torch.tensor([[4, 4, 9, 4]])  # a repeated number still begins a new document
    k_hat, _, new_state = kv_shift(
        column(1, 2, 3, 5), column(0, 0, 0, 0), TEN, BOTH, state=state, seq_idx=numbers, backend=backend
    )
    assert k_hat.flatten().tolist() == [71, 12, 3, 5]
    assert new_state.k.flatten().tolist() == [0, 5]


def test_padding_is_skipped(backend):
    """The previous token is the previous real one, and the state holds the last real token."""
    mask = torch.tensor([[False, True, False, True, False]])
    k_hat, _, state = kv_shift(column(50, 1, 60, 2, 70), column(0, 0, 0, 0, 0), TEN, BOTH, mask=mask, backend=backend)
    assert k_hat.flatten().tolist() == [0, 1, 0, 12, 0]
    assert state.k.item() == 2


def test_a_sequence_of_padding_alone_keeps_its_state(backend):
    state = ShiftState(column(8, 7), column(4, 3), 2)
    mask = torch.zeros(1, 3, dtype=torch.bool)
    k_hat, _, new_state = kv_shift(column(1, 2, 3), column(1, 2, 3), TEN, BOTH, state=state, mask=mask, backend=backend)
    assert k_hat.flatten().tolist() == [0, 0, 0]
    assert (new_state.k.flatten().tolist(), new_state.v.flatten().tolist()) == ([8, 7], [4, 3])


def test_one_tensor_alone(backend):
    """`shift_tokens` returns a state of up to `max_rows` rows."""
    x_hat, state = shift_tokens(column(1, 2), TEN, state=column(5), max_rows=2, backend=backend)
    assert x_hat.flatten().tolist() == [51, 12]
    assert state.flatten().tolist() == [1, 2]
    x_hat, state = shift_tokens(column(1, 2), TEN, backend=backend)
    assert x_hat.flatten().tolist() == [1, 12]
    assert state.flatten().tolist() == [2]
    x_hat, state = shift_tokens(column(1), TEN, state=column(5), max_rows=3, backend=backend)
    assert state.flatten().tolist() == [5, 1]


def test_state_grows_to_its_limit(backend):
    """After a crop, the state grows again by one row per token."""
    state, held = ShiftState.zeros(1, 1, 1, rows=3).crop(2), []
    for number in (1.0, 2.0, 3.0):
        _, _, state = kv_shift(column(number), column(-number), TEN, TEN, state=state, backend=backend)
        held.append(state.k.flatten().tolist())
    assert held == [[0, 1], [0, 1, 2], [1, 2, 3]]
    assert state.v.flatten().tolist() == [-1, -2, -3]
