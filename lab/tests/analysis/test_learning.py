"""Steps to a level of accuracy: interpolation, seeds that never reach it, and ratios."""

import math

import pytest

from kvshift_lab.analysis.learning import StepsToLevel, compare_steps, steps_to, steps_to_level


def reach(*steps, last_steps=600.0, level=0.99):
    return StepsToLevel(
        level=level, steps=dict(enumerate(steps)), last_steps=dict.fromkeys(range(len(steps)), last_steps)
    )


@pytest.mark.parametrize(
    ("accuracy", "level", "expected"),
    [
        ([0.1, 0.2, 0.8, 1.0], 0.5, 25.0),  # half way from 20 to 30
        ([0.1, 0.2, 0.8, 1.0], 0.8, 30.0),  # exactly at an evaluation
        ([0.1, 0.2, 0.8, 1.0], 0.95, 45.0),
        ([0.6, 0.2, 0.8, 1.0], 0.5, 10.0),  # already reached at the first evaluation
        ([0.1, 0.9, 0.2, 0.3], 0.5, 15.0),  # the first crossing counts, though accuracy falls again
        ([0.1, 0.2, 0.8, 0.9], 0.99, None),
    ],
)
def test_steps_to_a_level(accuracy, level, expected):
    found = steps_to([10, 20, 30, 50], accuracy, level)
    assert found == (expected if expected is None else pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize(
    ("steps", "accuracy", "level", "message"),
    [
        ([10, 20], [0.5], 0.9, "one value for each of 2 steps, got 1"),
        ([], [], 0.9, "at least one evaluation"),
        ([10, 20], [0.5, math.nan], 0.9, "accuracy must lie between 0 and 1"),
        ([10, 20], [5, 99], 0.9, "accuracy must lie between 0 and 1"),
        ([20, 10], [0.5, 0.6], 0.9, "steps must increase"),
        ([10], [0.5], 90, "level must be above 0 and at most 1, got 90"),
        ([10], [0.5], 0.0, "level must be above 0 and at most 1, got 0"),
    ],
)
def test_curves_that_make_no_sense(steps, accuracy, level, message):
    with pytest.raises(ValueError, match=message):
        steps_to(steps, accuracy, level)


def test_mean_and_interval_are_those_of_logarithms():
    found = reach(100, 200, 400)
    half = 4.302652729911275 * math.log(2) / math.sqrt(3)  # t(0.975, 2); deviations of the logs are ±log 2
    assert found.mean == pytest.approx(200, rel=1e-12)
    assert found.interval() == pytest.approx((200 * math.exp(-half), 200 * math.exp(half)), rel=1e-9)
    assert found.text == "99 % after 200 steps (95 % interval 36 to 1,119, 3 seeds)"


def test_a_missing_seed_is_never_averaged_away():
    found = reach(100, None, 200)
    assert (found.mean, found.interval(), found.missing) == (None, None, [1])
    assert found.text == "99 % not reached within 600 steps by 1 of 3 seeds; by the rest after 100, 200"
    assert reach(None, None, level=0.9).text == "90 % not reached within 600 steps by 2 of 2 seeds"
    unequal = StepsToLevel(level=0.9, steps={3: None, 5: None}, last_steps={3: 1200, 5: 600})
    assert unequal.text == "90 % not reached within 600 to 1,200 steps by 2 of 2 seeds"


def test_one_seed_and_equal_seeds_have_no_interval():
    assert reach(149.4).text == "99 % after 149 steps (1 seed)"
    assert reach(50, 50).interval() is None


def test_reach_from_curves():
    curves = {4: ([0, 10, 20], [0.0, 0.5, 1.0]), 7: ([0, 10, 30], [0.0, 0.1, 0.2])}
    assert steps_to_level(curves, 0.75) == StepsToLevel(
        level=0.75, steps={4: 15.0, 7: None}, last_steps={4: 20.0, 7: 30.0}
    )


@pytest.mark.parametrize(
    ("steps", "last_steps", "message"),
    [
        ({}, {}, "at least one seed"),
        ({0: 1.0}, {1: 2.0}, "the same seeds"),
        ({0: 0.0}, {0: 2.0}, "seed 0: steps must be above 0"),
        ({0: 3.0}, {0: 2.0}, "seed 0: steps must be above 0 and at most 2, got 3"),
    ],
)
def test_seeds_that_make_no_sense(steps, last_steps, message):
    with pytest.raises(ValueError, match=message):
        StepsToLevel(level=0.9, steps=steps, last_steps=last_steps)


def test_ratio_is_paired_by_seed():
    # The seeds differ by factors of ten, the ratios hardly: 0.5, 0.25, 0.5. The mean of their logs is -log(2) * 4/3.
    ours, theirs = reach(5, 25, 250), reach(10, 100, 500)
    found = compare_steps(ours, theirs)
    half = 4.302652729911275 * math.log(2) / 3  # the deviation of (0, -1, 0) is 1 / sqrt(3), over sqrt(3)
    assert found.ratio == pytest.approx(2 ** (-4 / 3), rel=1e-12)
    assert (found.low, found.high) == pytest.approx((found.ratio * math.exp(-half), found.ratio * math.exp(half)))
    assert found.outcome == "no difference shown"
    assert (found.at_least, found.at_most) == (0.25, 0.5)
    sooner = compare_steps(reach(5, 24, 251), reach(10, 50, 500))
    assert sooner.outcome == "sooner"
    assert sooner.text == "KV-shift needs 0.494 of the steps of vanilla (95 % interval 0.464 to 0.525, 3 seeds)"
    later = compare_steps(reach(10, 50, 500), reach(5, 24, 251), names=("a", "b"))
    assert later.outcome == "later"
    assert (later.low, later.high) == pytest.approx((1 / sooner.high, 1 / sooner.low))


def test_order_of_the_seeds_does_not_matter():
    ours = StepsToLevel(level=0.9, steps={2: 10.0, 1: 40.0}, last_steps={2: 50, 1: 50})
    theirs = StepsToLevel(level=0.9, steps={1: 80.0, 2: 40.0}, last_steps={1: 90, 2: 90})
    assert compare_steps(ours, theirs).at_most == 0.5


def test_a_ratio_to_runs_that_never_arrived_is_a_bound():
    found = compare_steps(reach(60, 90), reach(None, 300))
    assert (found.outcome, found.ratio, found.low, found.high) == ("sooner in every seed", None, None, None)
    assert (found.at_most, found.at_least) == (0.3, None)
    assert found.text.startswith("KV-shift needs at most 0.3 of the steps in each of 2 seeds, no interval (KV-shift: ")
    assert "vanilla: 99 % not reached within 600 steps by 1 of 2 seeds; by the rest after 300" in found.text
    other = compare_steps(reach(None, 300), reach(60, 90))
    assert (other.outcome, other.at_most) == ("later in every seed", None)
    assert other.at_least == pytest.approx(300 / 90)


def test_what_cannot_be_ordered_is_undecided():
    for ours, theirs in [
        (reach(None, 5), reach(None, 9)),  # a pair in which neither run arrived
        (reach(None, 5), reach(9, None)),
        (reach(700, 5, last_steps=900.0), reach(None, 9)),  # arrived after the steps that the other run was given
        (reach(5), reach(10)),  # one pair
        (reach(5, 50), reach(10, 100)),  # equal ratios
    ]:
        assert compare_steps(ours, theirs).outcome == "undecided"
    assert compare_steps(reach(5), reach(10)).text.startswith("KV-shift needs 0.5 of the steps of vanilla in this one")


def test_what_cannot_be_paired():
    with pytest.raises(ValueError, match=r"the same level, got 0\.99 and 0\.9$"):
        compare_steps(reach(5), reach(5, level=0.9))
    with pytest.raises(ValueError, match="the same seeds"):
        compare_steps(reach(5), reach(5, 6))
