"""Means, intervals, and where a curve first reaches a loss."""

import math

import pytest

from kvshift_lab.core.statistics import (
    Estimate,
    first_reached,
    mean_of,
    paired_difference,
    rank_correlation,
    t_interval,
)


def test_mean_and_standard_error_worked_by_hand():
    # The deviations are -3, -1, 4, so the variance is 26 / 2 = 13.
    assert mean_of([2.0, 4.0, 9.0]) == Estimate(5.0, pytest.approx(math.sqrt(13 / 3), rel=1e-15), 3)
    assert mean_of([7.0]) == Estimate(7.0, None, 1)


def test_pairing_removes_what_both_share():
    theirs = [3.0, 5.0, 11.0]
    assert paired_difference([2.0, 4.0, 10.0], theirs, [1, 1, 1]) == Estimate(-1.0, 0.0, 3)
    plain = mean_of([-0.5, -1.0, -0.75])
    found = paired_difference([2.5, 4.0, 10.25], theirs, [7, 7, 7])
    assert (found.mean, found.stderr) == pytest.approx((plain.mean, plain.stderr), rel=1e-14)
    assert paired_difference([2.5], [2.0], [3]) == Estimate(0.5, None, 1)


def test_sequences_count_by_their_tokens():
    # d = (1 * 1 + 3 * 5) / 4 = 4; w (d_i - d) = -3 and 3, whose deviation is sqrt(18); over mean weight 2, sqrt(2)
    assert paired_difference([2.0, 7.0], [1.0, 2.0], [1, 3]) == Estimate(4.0, pytest.approx(1.5, rel=1e-15), 2)


def test_interval_worked_by_hand():
    # t(0.975, 2) = 4.30265..., and the standard error is 1 / sqrt(3).
    low, high = t_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.302652729911275 / math.sqrt(3), 2 + 4.302652729911275 / math.sqrt(3)))
    narrow = t_interval([1.0, 2.0, 3.0], confidence=0.5)
    assert low < narrow[0] < narrow[1] < high


@pytest.mark.parametrize("function", [mean_of, t_interval])
@pytest.mark.parametrize(
    ("values", "message"), [([], "at least 1"), ([1.0, math.nan], "finite"), ([math.inf], "finite")]
)
def test_values_that_cannot_be_averaged(function, values, message):
    with pytest.raises(ValueError, match=message):
        function(values)


def test_arguments_that_make_no_sense():
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        t_interval([1.0])
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1, got 95"):
        t_interval([1.0, 2.0], confidence=95)
    with pytest.raises(ValueError, match="ours, theirs, weights must be equally long, got 2, 1, 2"):
        paired_difference([1.0, 2.0], [1.0], [1, 1])


@pytest.mark.parametrize(
    ("losses", "target", "expected"),
    [
        ([5.0, 4.0, 3.0], 3.5, 25.0),
        ([5.0, 4.0, 3.0], 4.0, 20.0),
        ([5.0, 4.0, 3.0], 2.9, None),
        ([5.0, 4.0, 3.0], 6.0, 10.0),
        ([5.0, 3.0, 4.0], 3.5, 17.5),  # the first crossing counts, though the loss rises again
        ([5.0, 4.5, 4.6, 4.4], 4.45, 37.5),
    ],
)
def test_where_a_curve_first_comes_down_to_a_loss(losses, target, expected):
    steps = [10 * (i + 1) for i in range(len(losses))]
    reached = first_reached(steps, losses, target)
    assert reached == (None if expected is None else pytest.approx(expected))


def test_rank_correlation_by_hand():
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 90.0]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    # The ranks 1 2 3 4 and 2 1 4 3 give 1 - 6 * 4 / (4 * 15).
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0]) == pytest.approx(0.6)
    # Equal values have the mean of their ranks: 1.5 1.5 3 against 1 2 3.
    assert rank_correlation([5.0, 5.0, 7.0], [1.0, 2.0, 3.0]) == pytest.approx(1.5 / math.sqrt(1.5 * 2))


def test_no_order_to_compare():
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    with pytest.raises(ValueError, match="ours and theirs must be equally long, got 3 and 2"):
        rank_correlation([1.0, 2.0, 3.0], [1.0, 2.0])
