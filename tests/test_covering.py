"""The cases that `covering` picks contain every pair of values, and there are few of them."""

from __future__ import annotations

import itertools

import pytest

from .covering import covering, pairs_reached


@pytest.mark.parametrize(
    ("sizes", "at_most"), [((4, 3), 12), ((2, 2, 2), 4), ((4, 5, 2, 2), 20), ((2, 3, 2, 2, 4), 15), ((7,), 0)], ids=str
)
def test_any_two_values_meet(sizes, at_most):
    axes = [list(range(size)) for size in sizes]
    cases = pairs_reached(axes)
    for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(first, second))
    assert len(cases) <= at_most


def test_a_case_is_named_after_its_values():
    names, cases = covering(window=[2, 3], rows={"fresh": None}).args
    assert names == ["window", "rows"]
    assert [(case.id, case.values) for case in cases] == [("2-fresh", (2, None)), ("3-fresh", (3, None))]
