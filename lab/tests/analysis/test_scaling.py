"""Power laws: the fit finds known parameters, and its intervals have the coverage that they claim."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvshift_lab.analysis.scaling import fit_power_law

SIZES = [2.4e4, 8e4, 2e5, 4.5e5, 9.8e5]  # close to the sizes of the recipe for a laptop
EXPONENT, CRITICAL = 0.076, 8.8e13  # from Kaplan et al. (2020)


def simulated(seed: int, *, seeds: int = 3, noise: float = 0.004) -> tuple[list[float], list[float]]:
    sizes = np.repeat(SIZES, seeds)
    drawn = np.random.default_rng(seed).normal(0, noise, len(sizes))
    return sizes.tolist(), ((CRITICAL / sizes) ** EXPONENT * np.exp(drawn)).tolist()


def test_points_on_the_line_give_its_parameters() -> None:
    found = fit_power_law(SIZES, [(CRITICAL / size) ** EXPONENT for size in SIZES])
    assert found.exponent.value == pytest.approx(EXPONENT, rel=1e-9)
    assert (found.exponent.low, found.exponent.high) == (found.exponent.value, found.exponent.value)
    assert found.critical_size == pytest.approx(CRITICAL, rel=1e-7)
    assert found.at(1e9).value == pytest.approx((CRITICAL / 1e9) ** EXPONENT, rel=1e-9)


def test_the_parameters_lie_within_the_interval_of_their_fit() -> None:
    found = fit_power_law(*simulated(5))
    assert found.exponent.low < EXPONENT < found.exponent.high
    assert found.exponent.high - found.exponent.low < 0.01
    beyond = found.at(1e7)
    assert beyond.low < (CRITICAL / 1e7) ** EXPONENT < beyond.high


@pytest.mark.parametrize(("seeds", "noise"), [(3, 0.004), (1, 0.004), (3, 0.05)])
def test_intervals_cover_as_often_as_they_say(seeds: int, noise: float) -> None:
    """Coverage of 95 % means 180 to 198 of 200 simulated fits, except once in a thousand times."""
    exponents = extrapolations = 0
    for seed in range(200):
        found = fit_power_law(*simulated(seed, seeds=seeds, noise=noise), draws=500)
        exponents += found.exponent.low <= EXPONENT <= found.exponent.high
        beyond = found.at(10 * SIZES[-1])
        extrapolations += beyond.low <= (CRITICAL / (10 * SIZES[-1])) ** EXPONENT <= beyond.high
    assert 180 <= exponents <= 198
    assert 180 <= extrapolations <= 198


def test_extrapolated_the_interval_grows() -> None:
    found = fit_power_law(*simulated(1))
    inside, outside = found.at(SIZES[2]), found.at(100 * SIZES[-1])
    assert outside.high / outside.low > inside.high / inside.low


@pytest.mark.parametrize("noise", [1e-6, 0.01, 0.5])
def test_three_points_decide_nothing(noise: float) -> None:
    """In one resample of nine, all residuals are equal, and there is no deviation to compare with."""
    found = fit_power_law([100.0, 200.0, 300.0], [5.0, 5.0 * (1 + noise), 5.0 * (1 - noise)])
    assert (found.at(3000.0).low, found.at(3000.0).high) == (0, math.inf)
    assert found.exponent.low < found.exponent.value < found.exponent.high


def test_the_exponent_of_a_ratio_is_the_difference_of_two() -> None:
    sizes, losses = simulated(2)
    others = [loss * 1.3 * size**-0.01 for size, loss in zip(sizes, losses, strict=True)]
    ratio = fit_power_law(sizes, [one / other for one, other in zip(others, losses, strict=True)])
    alone = fit_power_law(sizes, others).exponent.value - fit_power_law(sizes, losses).exponent.value
    assert ratio.exponent.value == pytest.approx(alone) == pytest.approx(0.01)
    assert ratio.at(1e6).value == pytest.approx(1.3 * 1e6**-0.01)


def test_the_same_seed_gives_the_same_interval() -> None:
    sizes, losses = simulated(3)
    assert fit_power_law(sizes, losses).exponent == fit_power_law(sizes, losses).exponent
    assert fit_power_law(sizes, losses).exponent != fit_power_law(sizes, losses, seed=1).exponent


@pytest.mark.parametrize(
    ("sizes", "losses", "said"),
    [
        ([1.0, 2.0, 3.0], [1.0], "losses must have one value for each of 3 sizes, got 1"),
        ([1.0, 2.0, 2.0], [1.0, 1.0, 1.0], "at least 3 different values"),
        ([0.0, 2.0, 3.0], [1.0, 1.0, 1.0], "sizes must be more than 0"),
        ([1.0, 2.0, 3.0], [1.0, 1.0, math.nan], "losses must be more than 0"),
    ],
)
def test_what_cannot_be_fitted(sizes: list[float], losses: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit_power_law(sizes, losses)
    with pytest.raises(ValueError, match="size must be more than 0"):
        fit_power_law(SIZES, SIZES).at(0)


def test_a_loss_that_hardly_falls_is_1_nowhere() -> None:
    assert fit_power_law([100.0, 200.0, 300.0], [5.001, 5.0, 5.0]).critical_size == math.inf
