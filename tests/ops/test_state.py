"""Every method of `ShiftState` compared with its definition, and rollback with never having seen the tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvshift.ops import ShiftState, kv_shift

from .cases import Case, random_case
from .checks import assert_same_state, check_cropped_tokens_were_never_seen, check_reordered_sequences_continue

WITH_QUERIES = pytest.mark.parametrize("queries", [False, True], ids=["", "queries"])


def a_state(sequences: int = 5, rows: int = 3, *, queries: bool = False, seed: int = 2) -> ShiftState:
    case = random_case(seed, batch=sequences, rows=rows)
    return ShiftState(case.state.k, case.state.v, rows, torch.sin(case.state.k.repeat(1, 1, 2, 1)) if queries else None)


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


@WITH_QUERIES
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
def test_select(indices, rows, queries):
    state = a_state(queries=queries)
    selected = state.select(indices)
    assert (selected.sequences, selected.rows, selected.max_rows) == (len(rows), 3, 3)
    for x, y in zip(tensors(selected), tensors(state), strict=True):
        assert torch.equal(x, torch.stack([y[i] for i in rows]) if rows else y[:0])


@WITH_QUERIES
def test_reorder(queries):
    state = a_state(queries=queries)
    order = [4, 1, 1, 0, 3]
    for x, y in zip(tensors(state.reorder(torch.tensor(order))), tensors(state), strict=True):
        assert torch.equal(x, torch.stack([y[i] for i in order]))


def test_reordered_sequences_continue(backend):
    check_reordered_sequences_continue(backend)


@WITH_QUERIES
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_crop(tokens, queries):
    state = a_state(queries=queries)
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


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("accepted", [[2, 0, 3, 1], [0, 0, 3, 3], [3, 3, 3, 3]], ids=str)
def test_speculative_decoding_is_plain_decoding(window, accepted, backend):
    """Each step feeds the last token and three drafts at once, keeps the accepted drafts, and crops the rest."""
    drafts = 3
    case = random_case(3, 2, 17, window=window)
    k_plain, v_plain, state_plain = case.call(backend)
    state = ShiftState.zeros(2, 3, 7, 5, rows=window - 1 + drafts)
    wrong = random_case(5, 2, 17)
    at = 0
    for count in accepted:
        k, v = case.k[:, at : at + 1 + drafts].clone(), case.v[:, at : at + 1 + drafts].clone()
        k[:, 1 + count :] = wrong.k[:, : k.shape[1] - 1 - count]
        v[:, 1 + count :] = wrong.v[:, : v.shape[1] - 1 - count]
        k_hat, v_hat, ahead = kv_shift(k, v, case.alpha, case.beta, state=state, backend=backend)
        state = ahead.crop(drafts - count, window=window)
        kept = slice(at, at + 1 + count)
        assert torch.equal(k_hat[:, : 1 + count], k_plain[:, kept])
        assert torch.equal(v_hat[:, : 1 + count], v_plain[:, kept])
        at += 1 + count
    k_hat, _, state = kv_shift(case.k[:, at:], case.v[:, at:], case.alpha, case.beta, state=state, backend=backend)
    assert torch.equal(k_hat, k_plain[:, at:])
    assert torch.equal(state.k[:, -(window - 1) :], state_plain.k)


def test_with_boundaries_the_state_keeps_its_length(backend):
    """The number of real tokens of a sequence is data, and the shape of its state must not depend on data."""
    case = random_case(11, 2, 4, rows=5)
    cropped = case.state.crop(3)
    mask = torch.ones(2, 4, dtype=torch.bool)
    masked = Case(case.k, case.v, case.alpha, case.beta, cropped, mask=mask).call(backend)[2]
    assert (masked.rows, masked.max_rows) == (2, 5)
    assert torch.equal(masked.k, case.k[:, -2:])


@WITH_QUERIES
def test_reset(queries):
    state = a_state(queries=queries).crop(1).reset()
    assert (state.sequences, state.rows, state.max_rows) == (5, 3, 3)
    assert len(tensors(state)) == 2 + queries
    assert not any(x.any() for x in tensors(state))


@WITH_QUERIES
def test_to(queries):
    state = a_state(queries=queries)
    assert {x.dtype for x in tensors(state.to(torch.bfloat16))} == {torch.bfloat16}
    assert {x.device.type for x in tensors(state.to("meta", dtype=torch.float64))} == {"meta"}
    assert {x.dtype for x in tensors(state)} == {torch.float32}
    for x, y in zip(tensors(state.to(torch.float64)), tensors(state), strict=True):
        assert torch.equal(x, y.double())


@WITH_QUERIES
def test_clone_and_detach(queries):
    state = a_state(queries=queries)
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


@WITH_QUERIES
@pytest.mark.parametrize(("sizes", "parts"), [(1, [1, 1, 1, 1, 1]), (2, [2, 2, 1]), ([1, 0, 4], [1, 0, 4])], ids=str)
def test_split_and_stack_are_inverses(sizes, parts, queries):
    state = a_state(queries=queries)
    pieces = state.split(sizes)
    assert [piece.sequences for piece in pieces] == parts
    for x, y in zip(tensors(ShiftState.stack(pieces)), tensors(state), strict=True):
        assert torch.equal(x, y)
    assert_same_state(pieces[-1], state.select(range(5 - parts[-1], 5)))


def test_requests_that_arrived_apart_continue_together(backend):
    """Batched decoding of three requests with prompts of different lengths equals decoding each of them alone."""
    case = random_case(13, batch=3, positions=7)
    alone, states = [], []
    for row, length in enumerate([6, 2, 4]):
        prompt = slice(row, row + 1), slice(0, length)
        _, _, state = kv_shift(case.k[prompt], case.v[prompt], case.alpha, case.beta, backend=backend)
        last = slice(row, row + 1), slice(6, 7)
        alone.append(kv_shift(case.k[last], case.v[last], case.alpha, case.beta, state=state, backend=backend))
        states.append(state)
    k_hat, v_hat, state = kv_shift(
        case.k[:, 6:], case.v[:, 6:], case.alpha, case.beta, state=ShiftState.stack(states), backend=backend
    )
    for row, part in enumerate(state.split()):
        assert torch.equal(k_hat[row], alone[row][0][0])
        assert torch.equal(v_hat[row], alone[row][1][0])
        assert_same_state(part, alone[row][2])


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
