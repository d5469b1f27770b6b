"""The words that measured numbers allow."""

from __future__ import annotations

import pytest

from kvshift.recipes.claims import higher, no_difference, percent, points

pytestmark = pytest.mark.no_models


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ([0.9, 0.92, 0.91], [0.5, 0.53, 0.5], "holds"),
        ([0.5, 0.53, 0.5], [0.9, 0.92, 0.91], "fails"),
        ([0.9, 0.4, 0.6], [0.5, 0.53, 0.5], "not shown"),
        ([0.9], [0.1], "not shown"),
        ([1.0, 1.0], [0.25, 0.25], "holds"),
        ([0.5, 0.5], [0.5, 0.5], "not shown"),
    ],
)
def test_higher(ours, theirs, found):
    assert higher(ours, theirs) == found


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ([0.50, 0.51, 0.50], [0.50, 0.50, 0.51], "holds"),
        ([0.9, 0.92, 0.91], [0.5, 0.53, 0.5], "fails"),
        ([0.5, 0.53, 0.5], [0.9, 0.92, 0.91], "fails"),
        ([0.9, 0.4, 0.6], [0.5, 0.53, 0.5], "not shown"),
        ([0.5], [0.5], "not shown"),
        ([0.513, 0.5121, 0.5125], [0.5, 0.5, 0.5], "holds"),  # other than 0, and within the margin
    ],
)
def test_no_difference_is_shown_by_an_interval_within_the_margin(ours, theirs, found):
    assert no_difference(ours, theirs, margin=0.05) == found


def test_percent():
    # mean 0.5, standard error 0.1 / sqrt(3), and 4.3027 of them on each side
    assert percent([0.4, 0.5, 0.6]) == "50.0 % (95 % interval 25.2 to 74.8, 3 seeds)"
    assert percent([0.9, 1.0, 1.0]) == "96.7 % (95 % interval 82.3 to 100.0, 3 seeds)"
    assert percent([0.123456], digits=2) == "12.35 % (1 seed)"


def test_points():
    assert points([0.6, 0.8, 1.0], [0.2, 0.3, 0.4]) == "+50.0 points (95 % interval +25.2 to +74.8)"
    assert points([0.25], [0.5]) == "-25.0 points (1 seed)"
