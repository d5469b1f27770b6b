"""Power laws of loss over model size, fitted with bootstrap intervals and extrapolated beyond the largest size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROUNDING = 1e-12
"""Relative tolerance: smaller values, relative to the numbers that they were computed from, count as 0."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} (95 % interval {self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """A fitted power law L(N) = (N_c / N)^a, a straight line of log L over log N, with its bootstrap.

    Attributes:
        coefficients: Coefficients of the line, a log N_c and -a.
        inverse: (X^T X)^-1 of the line's design matrix.
        deviation: Standard deviation of log L around the line, with n - 2 degrees of freedom.
        bootstrap_coefficients: (draws, 2) coefficients of the bootstrap fits.
        bootstrap_deviations: (draws,) standard deviations of the bootstrap fits.
    """

    coefficients: Any
    inverse: Any
    deviation: float
    bootstrap_coefficients: Any
    bootstrap_deviations: Any

    @property
    def exponent(self) -> Interval:
        """The exponent a with its interval."""
        found = self._interval(np.array([0.0, -1.0]))
        return Interval(*found)

    @property
    def critical_size(self) -> float:
        """The size N_c at which the loss would be 1; infinite if the loss hardly falls."""
        with np.errstate(over="ignore"):
            return float(np.exp(-self.coefficients[0] / self.coefficients[1]))

    def at(self, size: float) -> Interval:
        """Return the loss of the fitted line at a size; the interval does not include the scatter of single runs.

        The ends may be 0 and infinity: with three sizes and one seed, one residual degree of freedom remains.
        """
        if not 0 < size < math.inf:
            raise ValueError(f"size must be more than 0 and finite, got {size}")
        with np.errstate(over="ignore"):
            return Interval(*map(float, np.exp(self._interval(np.array([1.0, math.log(size)])))))

    def _interval(self, row: Any) -> tuple[float, float, float]:
        """Return row @ coefficients with its bootstrap-t interval, from quantiles of (estimate* - estimate) / error*.

        If all drawn residuals are the same one (with three points, one draw in nine), the line is only translated:
        error* is 0, the ratio of a loss is infinite, and the ratio of the exponent is undefined and ignored.
        """
        value = float(row @ self.coefficients)
        if self.deviation == 0:  # the points lie on the line
            return value, value, value
        root = math.sqrt(float(row @ self.inverse @ row))
        moved = self.bootstrap_coefficients @ row - value
        moved[np.abs(moved) < ROUNDING * max(1.0, abs(value))] = 0
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = moved / (self.bootstrap_deviations * root)
        ratios = ratios[~np.isnan(ratios)]
        below, above = np.quantile(ratios, [0.025, 0.975], method="closest_observation")  # never averages with infinity
        return value, value - float(above) * self.deviation * root, value - float(below) * self.deviation * root


def fit_power_law(sizes: Sequence[float], losses: Sequence[float], *, seed: int = 0, draws: int = 2000) -> PowerLaw:
    """Fit log L over log N by least squares, and bootstrap the residuals.

    The intervals are bootstrap-t intervals (Efron and Tibshirani, 1993, section 12.5; residuals as in 9.4): with the 15
    points of 5 sizes and 3 seeds, percentile intervals are too narrow. Runs are treated as independent. A ratio of two
    losses is a power law too: fitted to ratios of pairs, `exponent` is the difference of the two exponents.

    Args:
        sizes: N of each run, with at least 3 different values.
        losses: L of each run, above 0.
        seed: Random seed of the bootstrap.
        draws: Number of bootstrap samples.
    """
    if len(sizes) != len(losses):
        raise ValueError(f"losses must have one value for each of {len(sizes)} sizes, got {len(losses)}")
    if len(set(sizes)) < 3:
        raise ValueError(f"sizes must have at least 3 different values, got {sorted(set(sizes))}")
    for name, values in (("sizes", sizes), ("losses", losses)):
        if not all(0 < value < math.inf for value in values):
            raise ValueError(f"{name} must be more than 0 and finite, got {list(values)}")
    x = np.stack([np.ones(len(sizes)), np.log(np.asarray(sizes, dtype=float))], axis=1)
    y = np.log(np.asarray(losses, dtype=float))
    solve, free = np.linalg.pinv(x), len(sizes) - 2
    coefficients = solve @ y
    residuals = y - x @ coefficients
    rounding = ROUNDING * max(1.0, float(np.abs(y).max()))
    if np.abs(residuals).max() < rounding:
        residuals = np.zeros_like(residuals)
    again = x @ coefficients + np.random.default_rng(seed).choice(
        residuals * math.sqrt(len(sizes) / free), (draws, len(sizes))
    )
    bootstrap_coefficients = again @ solve.T
    left = again - bootstrap_coefficients @ x.T
    left[np.abs(left) < rounding] = 0
    return PowerLaw(
        coefficients=coefficients,
        inverse=np.linalg.inv(x.T @ x),
        deviation=math.sqrt(float(residuals @ residuals) / free),
        bootstrap_coefficients=bootstrap_coefficients,
        bootstrap_deviations=np.sqrt((left**2).sum(axis=1) / free),
    )
