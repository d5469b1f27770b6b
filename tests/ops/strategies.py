"""Hypothesis strategies for every shape, dtype, stride, boundary, padding and state that the operator accepts."""

from __future__ import annotations

from hypothesis import strategies as st

from .cases import DTYPES, LAYOUTS, Case, random_case


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple = DTYPES) -> Case:
    """Draw a batch or a pack, with or without state, padding and document numbers; lengths of 0 and 1 included."""
    window = draw(st.integers(2, 4), "window")
    shape: dict = {"window": window, "dtype": draw(st.sampled_from(dtypes), "dtype")}
    if draw(st.booleans(), "packed"):
        shape["lengths"] = draw(st.lists(st.integers(0, 5), min_size=0, max_size=5), "lengths")
        batch, positions = 1, sum(shape["lengths"])
    else:
        batch, positions = draw(st.integers(0, 3), "batch"), draw(st.integers(0, 7), "positions")
        if draw(st.booleans(), "with seq_idx"):
            shape["seq_idx"] = draw(_table(batch, positions, st.integers(-1, 1)), "seq_idx")
    if draw(st.booleans(), "with mask"):
        shape["mask"] = draw(_table(batch, positions, st.booleans()), "mask")
    if draw(st.booleans(), "with state"):
        shape["rows"] = window - 1 + draw(st.integers(0, 3), "spare rows")
    return random_case(
        draw(st.integers(0, 2**32 - 1), "seed"),
        batch,
        positions,
        heads=draw(st.sampled_from([1, 2, 3]), "heads"),
        k_dim=draw(st.sampled_from([1, 5, 7]), "k_dim"),
        v_dim=draw(st.sampled_from([1, 3, 11]), "v_dim"),
        layout=draw(st.sampled_from(LAYOUTS), "layout"),
        grad_layout=draw(st.sampled_from([*LAYOUTS, "expanded"]), "grad_layout"),
        **shape,
    )


def _table(rows: int, columns: int, cells: st.SearchStrategy) -> st.SearchStrategy[list[list]]:
    row = st.lists(cells, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)
