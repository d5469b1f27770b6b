"""Every method of `ShiftState` compared with its definition, and rollback with never having seen the tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvshift.ops import ShiftState

from .cases import Case, random_case
from .checks import check_cropped_tokens_were_never_seen, check_reordered_sequences_continue


def a_state(rows: int = 3, *, queries: bool = False) -> ShiftState:
    case = random_case(2, batch=5, rows=rows)
    return ShiftState(case.state.k, case.state.v, rows, torch.sin(case.state.k.repeat(1, 1, 2, 1)) if queries else None)


@pytest.fixture(params=[False, True], ids=["", "queries"])
def state(request: pytest.FixtureRequest) -> ShiftState:
    """The state of 5 sequences, with 3 rows each."""
    return a_state(queries=request.param)


def tensors(state: ShiftState) -> list[Tensor]:
    return [state.k, state.v] if state.q is None else [state.k, state.v, state.q]


def test_zeros():
    state = ShiftState.zeros(2, 3, 7, 5, rows=4, dtype=torch.bfloat16)
    assert (state.k.shape, state.v.shape, state.q) == ((2, 4, 3, 7), (2, 4, 3, 5), None)
    assert (state.sequences, state.rows, state.max_rows) == (2, 4, 4)
    assert state.k.dtype == state.v.dtype == torch.bfloat16
    assert not state.k.any()
    assert not state.v.any()
    alike = ShiftState.zeros(2, 3, 7)
    assert (alike.k.shape, alike.v.shape, alike.k.dtype) == ((2, 1, 3, 7), (2, 1, 3, 7), torch.float32)


@pytest.mark.parametrize(
    ("indices", "rows"),
    [
        ([3, 0, 0], [3, 0, 0]),
        (torch.tensor([4, 2], dtype=torch.int32), [4, 2]),
        ([True, False, False, True, False], [0, 3]),
        (torch.zeros(5, dtype=torch.bool), []),
        ([], []),
    ],
    ids=["list", "tensor", "booleans", "no booleans", "none"],
)
def test_select(indices, rows, state):
    selected = state.select(indices)
    assert (selected.sequences, selected.rows, selected.max_rows) == (len(rows), 3, 3)
    for x, y in zip(tensors(selected), tensors(state), strict=True):
        assert torch.equal(x, torch.stack([y[i] for i in rows]) if rows else y[:0])


def test_reorder(state):
    order = [4, 1, 1, 0, 3]
    for x, y in zip(tensors(state.reorder(torch.tensor(order))), tensors(state), strict=True):
        assert torch.equal(x, torch.stack([y[i] for i in order]))


def test_reordered_sequences_continue(backend):
    check_reordered_sequences_continue(backend)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_crop(tokens, state):
    cropped = state.crop(tokens)
    assert (cropped.rows, cropped.max_rows) == (3 - tokens, 3)
    for x, y in zip(tensors(cropped), tensors(state), strict=True):
        assert torch.equal(x, y[:, : 3 - tokens])


@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("window", [2, 3, 4])
def test_cropped_tokens_were_never_seen(tokens, window, backend):
    check_cropped_tokens_were_never_seen(backend, tokens, window)


@pytest.mark.parametrize(("window", "tokens", "needed"), [(2, 3, 4), (3, 2, 4), (4, 1, 4), (2, 100, 101)])
def test_a_crop_beyond_the_state_says_what_would_have_been_needed(window, tokens, needed):
    message = f"cannot crop {tokens} tokens: the state holds 3 rows .* keep max_rows >= {needed} .it is 3.*recovered"
    with pytest.raises(ValueError, match=message):
        a_state().crop(tokens, window=window)


def test_two_crops_take_back_no_more_than_one():
    state = a_state(rows=4).crop(2)
    assert state.crop(1).rows == 1
    with pytest.raises(ValueError, match="cannot crop 2 tokens: the state holds 2 rows"):
        state.crop(2)


def test_with_boundaries_the_state_keeps_its_length(backend):
    """The number of real tokens of a sequence is data, and the shape of its state must not depend on data."""
    case = random_case(11, 2, 4, rows=5)
    cropped = case.state.crop(3)
    mask = torch.ones(2, 4, dtype=torch.bool)
    masked = Case(case.k, case.v, case.alpha, case.beta, cropped, mask=mask).call(backend)[2]
    assert (masked.rows, masked.max_rows) == (2, 5)
    assert torch.equal(masked.k, case.k[:, -2:])


def test_reset(state):
    fresh = state.crop(1).reset()
    assert (fresh.sequences, fresh.rows, fresh.max_rows) == (5, 3, 3)
    assert len(tensors(fresh)) == len(tensors(state))
    assert not any(x.any() for x in tensors(fresh))


def test_to(state):
    assert {x.dtype for x in tensors(state.to(torch.bfloat16))} == {torch.bfloat16}
    assert {x.device.type for x in tensors(state.to("meta", dtype=torch.float64))} == {"meta"}
    assert {x.dtype for x in tensors(state)} == {torch.float32}
    for x, y in zip(tensors(state.to(torch.float64)), tensors(state), strict=True):
        assert torch.equal(x, y.double())


def test_clone_and_detach(state):
    for x in tensors(state):
        x.requires_grad_()
    clone, detached = state.clone(), state.detach()
    for x, y, z in zip(tensors(state), tensors(clone), tensors(detached), strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, z)
        assert y.requires_grad
        assert y.data_ptr() != x.data_ptr()
        assert not z.requires_grad
        assert z.data_ptr() == x.data_ptr()  # like Tensor.detach


@pytest.mark.parametrize(("sizes", "parts"), [(1, [1, 1, 1, 1, 1]), (2, [2, 2, 1]), ([1, 0, 4], [1, 0, 4])], ids=str)
def test_split_and_stack_are_inverses(sizes, parts, state):
    pieces = state.split(sizes)
    assert [piece.sequences for piece in pieces] == parts
    for x, y in zip(tensors(ShiftState.stack(pieces)), tensors(state), strict=True):
        assert torch.equal(x, y)
    assert pieces[-1] == state.select(range(5 - parts[-1], 5))


@pytest.mark.parametrize(
    "method",
    [
        lambda state: state.select([1, 0]),
        lambda state: state.reorder([4, 3, 2, 1, 0]),
        lambda state: state.crop(0),
        lambda state: state.crop(2),
        lambda state: state.reset(),
        lambda state: state.clone(),
        lambda state: ShiftState.stack(state.split(2)),
        lambda state: ShiftState.stack([state]),
        lambda state: state.split([5])[0],
    ],
    ids=["select", "reorder", "crop 0", "crop 2", "reset", "clone", "split", "stack", "split whole"],
)
def test_methods_give_states_of_their_own(method):
    state = a_state(queries=True)
    before = [x.clone() for x in tensors(state)]
    for x in tensors(method(state)):
        x.fill_(torch.nan)
    for x, y in zip(tensors(state), before, strict=True):
        assert torch.equal(x, y)


def test_states_are_equal_by_their_numbers():
    rows = torch.arange(6.0).reshape(3, 1, 2, 1)
    state = ShiftState(rows, rows + 1, 1)
    assert state == ShiftState(rows.clone(), rows + 1, 1)
    for other in (
        ShiftState(rows + 1, rows + 1, 1),
        ShiftState(rows, rows + 1, 2),
        ShiftState(rows, rows + 1, 1, rows),
        ShiftState(rows.double(), rows + 1, 1),
        ShiftState(rows.to("meta"), rows + 1, 1),
        ShiftState(rows[:2], rows + 1, 1),
        (rows, rows + 1, 1),
    ):
        assert state != other
    assert replace(state, q=rows) == replace(state, q=rows.clone())
