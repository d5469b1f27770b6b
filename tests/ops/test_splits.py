"""A sequence fed in pieces, with the state passed on, gives every bit of the whole, in every dtype, for every cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshift.ops import torch_ops

from ..covering import covering
from .cases import DTYPES, Case, random_case
from .checks import LENGTHS, check_pieces_are_the_whole
from .strategies import cases

WINDOWS = [2, 3, 4]
SPARE = {"fresh": None, "state": 0, "spare rows": 3}
MASKS = [[0, 0, 0, 1, 1, 1, 1], [1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0]]
MASK_OF_PACK = [[1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0]]


def check_every_cut(case: Case, backend: str, positions: int) -> None:
    """Check a single cut at every position, both ends included, and cuts after every token."""
    check_pieces_are_the_whole(case, backend, *([cut] for cut in range(positions + 1)), range(1, positions))


@covering(dtype=DTYPES, spare_rows=SPARE, window=WINDOWS, masks={"no padding": None, "padding": MASKS})
def test_sequences(dtype, spare_rows, window, masks, backend):
    kept = None if spare_rows is None else window - 1 + spare_rows
    case = random_case(2, 3, 7, dtype=dtype, window=window, rows=kept, mask=masks)
    check_every_cut(case, backend, 7)


@covering(dtype=DTYPES, spare_rows=SPARE, window=WINDOWS, masks={"no padding": None, "padding": MASK_OF_PACK})
def test_packs(dtype, spare_rows, window, masks, backend):
    """Each call gets a pack of the next piece of every sequence; the pieces of sequences that have ended are empty."""
    kept = None if spare_rows is None else window - 1 + spare_rows
    case = random_case(3, lengths=LENGTHS, dtype=dtype, window=window, rows=kept, mask=masks)
    check_every_cut(case, backend, max(LENGTHS))


@pytest.mark.parametrize("window", WINDOWS)
def test_cuts_inside_numbered_documents(window, backend):
    """The first document of a call continues the state, so only cuts inside documents may pass the state on."""
    numbers = [[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5]]
    case = random_case(11, 2, 7, window=window, rows=4, seq_idx=numbers)
    check_pieces_are_the_whole(case, backend, [0], [1], [2], [4], [6], [7], [1, 2, 4, 6])


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
