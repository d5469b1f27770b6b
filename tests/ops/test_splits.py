"""A sequence fed in pieces, with the state passed on, gives every bit of the whole, in every dtype, for every cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshift.ops import kv_shift, torch_ops

from ..covering import covering
from .cases import DTYPES, Case, outcome, random_case
from .checks import LENGTHS, check_pieces_are_the_whole
from .strategies import cases

WINDOWS = [2, 3, 4]
SPARE = {"fresh": None, "state": 0, "spare rows": 3}
states = covering(spare_rows=SPARE, window=WINDOWS)
windows = pytest.mark.parametrize("window", WINDOWS)


def check_every_cut(case: Case, backend: str, positions: int) -> None:
    """Check a single cut at every position, both ends included, and cuts after every token."""
    check_pieces_are_the_whole(case, backend, *([cut] for cut in range(positions + 1)), range(1, positions))


@covering(dtype=DTYPES, spare_rows=SPARE, window=WINDOWS)
def test_sequences(dtype, spare_rows, window, backend):
    kept = None if spare_rows is None else window - 1 + spare_rows
    check_every_cut(random_case(2, 2, 7, dtype=dtype, window=window, rows=kept), backend, 7)


@covering(dtype=DTYPES, spare_rows=SPARE, window=WINDOWS)
def test_packs(dtype, spare_rows, window, backend):
    """Each call gets a pack of the next piece of every sequence; the pieces of sequences that have ended are empty."""
    kept = None if spare_rows is None else window - 1 + spare_rows
    case = random_case(3, lengths=LENGTHS, dtype=dtype, window=window, rows=kept)
    check_every_cut(case, backend, max(LENGTHS))


@states
def test_cuts_through_padding(spare_rows, window, backend):
    kept = None if spare_rows is None else window - 1 + spare_rows
    masks = [[0, 0, 0, 1, 1, 1, 1], [1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0]]
    check_every_cut(random_case(5, 3, 7, window=window, rows=kept, mask=masks), backend, 7)


@states
def test_padded_packs(spare_rows, window, backend):
    kept = None if spare_rows is None else window - 1 + spare_rows
    mask = [[1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0]]
    case = random_case(7, lengths=LENGTHS, window=window, rows=kept, mask=mask)
    check_every_cut(case, backend, max(LENGTHS))


@windows
def test_cuts_inside_numbered_documents(window, backend):
    """The first document of a call continues the state, so only cuts inside documents may pass the state on."""
    numbers = [[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5]]
    case = random_case(11, 2, 7, window=window, rows=4, seq_idx=numbers)
    check_pieces_are_the_whole(case, backend, [0], [1], [2], [4], [6], [7], [1, 2, 4, 6])


@windows
def test_a_cut_between_numbered_documents_with_a_fresh_state(window, backend):
    case = random_case(13, 1, 7, window=window, seq_idx=[[0, 0, 0, 1, 1, 2, 2]])
    k_hat, v_hat, state = case.call(backend)
    for cut in (3, 5):
        *tail, tail_state = kv_shift(
            case.k[:, cut:], case.v[:, cut:], case.alpha, case.beta, seq_idx=case.seq_idx[:, cut:], backend=backend
        )
        assert torch.equal(tail[0], k_hat[:, cut:])
        assert torch.equal(tail[1], v_hat[:, cut:])
        assert torch.equal(tail_state.k, state.k)


@pytest.mark.slow
@given(case=cases(), data=st.data())
def test_search_for_cuts_that_matter(case, data):
    if case.seq_idx is not None:
        case = Case(case.k, case.v, case.alpha, case.beta, case.state, mask=case.mask)
    end = case.k.shape[1]
    if case.cu_seqlens is not None:
        end = max([0, *case.cu_seqlens.diff().tolist()])
    cuts = data.draw(st.lists(st.integers(0, end), max_size=4).map(sorted), "cuts")
    check_pieces_are_the_whole(case, "eager", cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 128), (37, 5)], ids=str)
def test_long_sequences_in_blocks_and_threads(dtype, dims):
    """The blocks are long enough for two threads; odd sizes leave remainders of every vector width."""
    case = random_case(17, 1, 1031, heads=5, k_dim=dims[0], v_dim=dims[1], dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_ops, "_BLOCK", 64 * 5 * 211)
            check_pieces_are_the_whole(case, "eager", [1, 2, 17, 18, 512, 1030], range(1, 1031, 3))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["sequence", "pack"])
def test_gradients_come_back_through_the_state(window, lengths, backend):
    """Backpropagation through two pieces gives the gradients of the whole sequence."""
    shape = {"lengths": lengths, "positions": 7, "window": window, "rows": window}
    case = random_case(19, 1, dtype=torch.float64, coefficient_dtype=torch.float64, **shape)
    expected = outcome(case, backend)
    leaves = case.leaves()
    for x in leaves.values():
        x.requires_grad_()
    bounds = [0, 7] if lengths is None else case.cu_seqlens.tolist()
    middles = [(start + end) // 2 for start, end in itertools.pairwise(bounds)]
    first = [t for start, middle in zip(bounds[:-1], middles, strict=True) for t in range(start, middle)]
    second = [t for middle, end in zip(middles, bounds[1:], strict=True) for t in range(middle, end)]

    state, weighted = case.state, []
    for piece, starts, ends in ((first, bounds[:-1], middles), (second, middles, bounds[1:])):
        sizes = torch.tensor([0, *(end - start for start, end in zip(starts, ends, strict=True))])
        pack = None if lengths is None else sizes.cumsum(0)
        part = Case(case.k[:, piece], case.v[:, piece], case.alpha, case.beta, state, pack)
        k_hat, v_hat, state = part.call(backend)
        weighted += [(k_hat, case.grads[0][:, piece]), (v_hat, case.grads[1][:, piece])]
    weighted += [(state.k, case.grads[2]), (state.v, case.grads[3])]
    results, grads = zip(*weighted, strict=True)
    gradients = torch.autograd.grad(results, list(leaves.values()), grads)
    for name, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(gradient, expected[f"gradient of {name}"], rtol=0, atol=1e-12)
