"""The verdicts that measured numbers allow."""

from __future__ import annotations

import math

import pytest

from kvshift_lab.analysis.learning import StepsToLevel, compare_steps
from kvshift_lab.core.statistics import Estimate
from kvshift_lab.study.claims import higher, percent, points, reached, sign_test, sooner, times, verdict, within


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ([0.9, 0.92, 0.91], [0.5, 0.53, 0.5], "holds"),
        ([0.5, 0.53, 0.5], [0.9, 0.92, 0.91], "fails"),
        ([0.9, 0.4, 0.6], [0.5, 0.53, 0.5], "not shown"),
        ([0.9], [0.1], "not shown"),
        ([1.0] * 5, [0.25] * 5, "not shown"),  # without spread there is no interval
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
        ([0.56, 0.57, 0.53], [0.5, 0.5, 0.5], "not shown"),  # the interval excludes 0 and reaches beyond the margin
        ([0.5], [0.5], "not shown"),
        ([0.513, 0.5121, 0.5125], [0.5, 0.5, 0.5], "holds"),  # the interval excludes 0 and is within the margin
        ([1.0] * 3, [1.0] * 3, "not shown"),  # three equal pairs decide nothing
        ([1.0] * 5, [1.0] * 5, "not shown"),
        ([1.0] * 6, [1.0] * 6, "holds"),
        ([0.7] * 5, [0.5] * 5, "not shown"),
    ],
)
def test_within_a_margin_is_what_an_interval_inside_it_shows(ours, theirs, found):
    assert within(ours, theirs, margin=0.05) == found


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([100, 110, 120], "holds"),
        ([100, 200, 390], "not shown"),  # the interval ends at 1,100 steps
        ([100, 110, None], "not shown"),
        ([None] * 3, "not shown"),
        ([None] * 5, "not shown"),
        ([None] * 6, "fails"),
        ([100] * 5, "not shown"),
        ([100] * 6, "holds"),
    ],
)
def test_a_level_is_reached_within_the_steps_that_there_were(steps: list, found: str):
    reach = StepsToLevel(level=0.99, steps=dict(enumerate(steps)), last_steps=dict.fromkeys(range(len(steps)), 400.0))
    assert reached(reach, 400) == found


def test_a_level_that_all_seeds_reach_too_late_fails():
    reach = StepsToLevel(level=0.99, steps=dict.fromkeys(range(6), 100), last_steps=dict.fromkeys(range(6), 400.0))
    assert (reached(reach, 100), reached(reach, 99)) == ("holds", "fails")


@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        (0, 0, "not shown"),
        (3, 0, "not shown"),  # by chance once in 8 times
        (4, 0, "not shown"),  # once in 16
        (5, 0, "not shown"),  # once in 32, and as often the other way
        (6, 0, "holds"),  # once in 64
        (0, 6, "fails"),
        (7, 1, "not shown"),  # 9 in 256
        (8, 1, "holds"),  # 10 in 512
        (1, 8, "fails"),
        (8, 2, "not shown"),  # 56 in 1024
        (9, 1, "holds"),  # 11 in 1024
        (5, 5, "not shown"),
    ],
)
def test_the_sign_test(right: int, wrong: int, found: str):
    assert sign_test(right, wrong) == found


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ([10, 20, 30, 40, 50, 60, None], [None] * 7, "holds"),  # nothing is known about one pair
        ([10, 20, 30, 40, 50, None], [None] * 6, "not shown"),
        ([10] * 6, [20] * 6, "holds"),  # equal ratios have no interval either
        ([20] * 6, [10] * 6, "fails"),
        ([10] * 5, [20] * 5, "not shown"),
        ([None] * 7, [10, 20, 30, 40, 50, 60, None], "fails"),
        ([10, 20, 30, 40, 50, 60, 70, 80, 90], [None] * 8 + [5], "holds"),
        ([10, 20, 30, 40, 50, 60, 70, 80], [None] * 7 + [5], "not shown"),
    ],
)
def test_sooner_without_an_interval_counts_the_pairs_whose_order_is_known(ours: list, theirs: list, found: str):
    seeds = range(len(ours))
    within = dict.fromkeys(seeds, 100.0)
    reaches = (
        StepsToLevel(level=0.2, steps=dict(zip(seeds, steps, strict=True)), last_steps=within)
        for steps in (ours, theirs)
    )
    assert sooner(compare_steps(*reaches)) == found


def test_percent():
    # The mean is 0.5, its standard error 0.1 / sqrt(3), and the interval is 4.3027 of them to each side.
    assert percent([0.4, 0.5, 0.6]) == "50.0 % (95 % interval 25.2 to 74.8, 3 seeds)"
    assert percent([0.9, 1.0, 1.0]) == "96.7 % (95 % interval 82.3 to 100.0, cut at 100, 3 seeds)"
    assert percent([0.0, 0.9, 1.0]).endswith("(95 % interval 0.0 to 100.0, cut at 0 and 100, 3 seeds)")
    assert percent([1.0, 1.0, 1.0]) == "100.0 % in each of 3 seeds"
    assert percent([0.123456]) == "12.3 % (1 seed)"


def test_points():
    assert points([0.6, 0.8, 1.0], [0.2, 0.3, 0.4]) == "+50.0 points (95 % interval +25.2 to +74.8)"
    assert points([0.25], [0.5]) == "-25.0 points (1 seed)"
    assert points([1.0, 1.0], [1.0, 1.0]) == "no difference in any of 2 seeds"
    assert points([0.75, 0.75], [0.5, 0.5]) == "+25.0 points in each of 2 seeds, which gives no interval"


def test_no_end_of_an_interval_reads_as_0_that_is_not():
    """By hand, for two seeds: half the interval is 12.7062 times half their difference."""
    assert points([0.0100, 0.0117], [0.0, 0.0]) == "+1.085 points (95 % interval +0.005 to +2.165)"
    assert points([0.0100, 0.0112], [0.0, 0.0]) == "+1.1 points (95 % interval +0.3 to +1.8)"


def test_times():
    ours, theirs = ([math.log(value) for value in values] for values in ([3.0, 5.0, 4.0], [2.0, 2.0, 2.0]))
    assert times(ours, theirs) == "times 1.96 (95 % interval 1.04 to 3.70)"
    assert times(ours[:1], theirs[:1]) == "times 1.50 (1 seed)"
    assert times(ours[:1] * 2, theirs[:2]) == "times 1.50 in each of 2 seeds, which gives no interval"
    assert times(theirs, theirs) == "times 1.00 (95 % interval 1.00 to 1.00)"


@pytest.mark.parametrize(("sign", "outcome", "name"), [(-1, "lower", "KV-shift"), (1, "higher", "vanilla")])
def test_a_difference_is_said_where_the_interval_leaves_zero_out(sign, outcome, name):
    found = verdict([sign * 0.015, sign * 0.016, sign * 0.017])
    assert found.outcome == outcome
    assert found.text == f"{name} lower by 0.0160 (95 % interval 0.0135 to 0.0185, 3 seeds)"
    assert sorted((sign * found.low, sign * found.high)) == pytest.approx((0.0135159, 0.0184841), abs=1e-7)


def test_nothing_is_claimed_where_the_interval_holds_zero():
    found = verdict([-0.016, -0.002])  # the half width is 12.7 standard errors
    assert found.outcome == "no difference shown"
    assert found.text == (
        "no difference shown: KV-shift minus vanilla is -0.0090 (95 % interval -0.0979 to +0.0799, 2 seeds)"
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_an_interval_that_touches_zero_shows_nothing(monkeypatch, sign):
    interval = sorted((0.0, sign * 0.02))
    monkeypatch.setattr("kvshift_lab.core.statistics.t_interval", lambda values: tuple(interval))
    assert verdict([sign * 0.005, sign * 0.015]).outcome == "no difference shown"


def test_an_end_near_zero_is_not_rounded_to_it(monkeypatch):
    monkeypatch.setattr("kvshift_lab.core.statistics.t_interval", lambda values: (-0.02, -0.0000123))
    assert verdict([-0.005, -0.015]).text == (
        "KV-shift lower by 0.010000 (95 % interval 0.000012 to 0.020000, 2 seeds)"
    )


def test_one_seed_says_what_one_seed_shows():
    found = verdict([-0.0160], rows=Estimate(-0.0160, 0.0011, 41))
    assert (found.outcome, found.low, found.high) == ("undecided", None, None)
    assert found.text == (
        "KV-shift minus vanilla is -0.0160 in this one pair of runs (standard error over 41 validation sequences "
        "0.0011); how much another seed changes that is unknown"
    )
    assert "standard error" not in verdict([-0.0160]).text
    assert "standard error" not in verdict([-0.0160], rows=Estimate(-0.0160, None, 1)).text


def test_equal_twins_show_no_difference():
    assert verdict([0.0, 0.0, 0.0]).outcome == "no difference shown"
    assert verdict([0.0]).outcome == "undecided"


def test_seeds_that_do_not_vary_are_no_evidence():
    found = verdict([-0.016, -0.016, -0.016])
    assert (found.outcome, found.low, found.high) == ("undecided", None, None)
    assert "are not independent" in found.text


@pytest.mark.parametrize(
    ("values", "message"), [([], "at least 1"), ([1.0, math.nan], "finite"), ([math.inf], "finite")]
)
def test_differences_without_a_verdict(values, message):
    with pytest.raises(ValueError, match=message):
        verdict(values)
