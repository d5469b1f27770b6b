"""Nothing crosses a document boundary, and padding affects nothing, neither forward nor in any gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshift.ops.boundaries import NO_ROW, plan_shift

from ..covering import covering
from .cases import DTYPES, outcome, random_case
from .checks import LENGTHS, check_documents_do_not_touch, check_pack_is_its_sequences, check_padding_is_as_if_absent

ROWS = {"fresh": None, "state": 4}
MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]],
    "right": [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]],
    "both": [[0, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0]],
    "holes": [[1, 0, 1, 1, 0, 0, 1], [0, 1, 0, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0, 1]],
    "nothing real": [[0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]],
}


@covering(
    named={"pack": "cu_seqlens", "numbered": "seq_idx"},
    dtype=DTYPES,
    rows=ROWS,
    content=[-29.0, torch.nan, torch.inf],
    window=[2, 4],
)
def test_the_end_of_one_document_reaches_no_other(named, dtype, rows, content, window, backend):
    numbers = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    numbered = {"batch": 2, "positions": len(numbers), "seq_idx": [numbers, numbers]}
    documents = {"lengths": LENGTHS} if named == "cu_seqlens" else numbered
    case = random_case(2, **documents, window=window, rows=rows, dtype=dtype)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    spans = [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]
    check_documents_do_not_touch(case, backend, spans, content)


@covering(rows=ROWS, window=[2, 3], mask={"no padding": None, "padding": [[1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0]]})
def test_a_pack_is_its_sequences_one_by_one(rows, window, mask, backend):
    case = random_case(5, lengths=LENGTHS, window=window, rows=rows, mask=mask)
    check_pack_is_its_sequences(case, backend, LENGTHS)


@pytest.mark.slow
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6), window=st.integers(2, 4))
def test_search_for_a_pack_that_differs_from_its_sequences(lengths, window):
    case = random_case(7, lengths=lengths, window=window, rows=window, heads=2, k_dim=3, v_dim=1)
    check_pack_is_its_sequences(case, "eager", lengths)


def test_as_many_sequences_as_the_longest_has_tokens(backend):
    """Sizes that are equal by chance are not confused: 3 sequences, one with 3 tokens; 3 sequences of one token."""
    for lengths in ([3, 1, 2], [1, 1, 1], [3]):
        check_pack_is_its_sequences(random_case(11, lengths=lengths, rows=1), backend, lengths)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32], ids=str)
def test_document_numbers_may_be_of_any_integer_dtype(dtype, backend):
    case = random_case(17, 1, 5, seq_idx=[[3, 3, -7, 5, 5]])
    assert case.seq_idx.dtype == torch.int64
    assert torch.equal(replace(case, seq_idx=case.seq_idx.to(dtype)).call(backend)[0], case.call(backend)[0])


@covering(masks=MASKS, rows=ROWS, pad=[0.0, 31.0, torch.nan, torch.inf])
def test_padding_is_as_if_absent(masks, rows, pad, backend):
    check_padding_is_as_if_absent(backend, masks, rows, pad)


@pytest.mark.slow
@given(
    masks=st.integers(0, 5).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=2, max_size=2)
    ),
    rows=st.sampled_from([None, 1, 3]),
)
def test_search_for_padding_that_matters(masks, rows):
    check_padding_is_as_if_absent("eager", masks, rows, torch.nan)


@pytest.mark.parametrize("window", [2, 3, 4])
def test_a_token_reaches_as_far_as_the_window_and_no_token_before_it(window, backend):
    """Causality: k_hat[t] depends on k[s] if s is one of the W tokens up to t, and on no other."""
    case = random_case(23, positions=7, window=window)
    for t in range(7):
        picked = torch.zeros_like(case.k)
        picked[:, t] = 1
        grads = (picked, *map(torch.zeros_like, case.grads[1:]))
        reached = outcome(replace(case, grads=grads), backend)["gradient of k"] != 0
        for s in range(7):
            assert reached[:, s].all() if t - window < s <= t else not reached[:, s].any(), (t, s)


def test_a_plan_names_rows_of_state_from_its_end():
    """A sequence of 2 tokens around a pad and one of 1 token, with two rows of state each: -4 and -3, -2 and -1."""
    bounds = torch.tensor([0, 3, 4], dtype=torch.int32)
    mask = torch.tensor([[True, False, True, True]])
    plan = plan_shift(1, 4, 3, 2, torch.device("cpu"), cu_seqlens=bounds, mask=mask, backward=True)
    no = NO_ROW
    assert plan.sources.tolist() == [[[0, -3, -4], [no, no, no], [2, 0, -3], [3, -1, -2]]]
    assert plan.next_state.tolist() == [[0, 2, -1, 3]]
    of_state = [[no, no, 0], [no, 0, 2], [no, no, 3], [no, 3, no]]
    assert plan.readers.tolist() == [[*of_state, [0, 2, no], [no, no, no], [2, no, no], [3, no, no]]]
    assert {x.dtype for x in plan} == {torch.int32}
    assert plan_shift(1, 4, 3, 2, torch.device("cpu"), cu_seqlens=bounds, mask=mask).readers is None
