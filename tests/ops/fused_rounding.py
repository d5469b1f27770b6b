"""Bounds on how far rounding may take a result of shift + QK-norm + RoPE from the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvshift.ops import shift_tokens

from .fused_cases import FusedCase, launched, outcome, without_state
from .rounding import assert_close


@dataclass(frozen=True)
class Rounded:
    """Exact numbers and bounds on their errors, if every operation has a relative rounding error of `unit` at most.

    The rules are those of a running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section
    3.3). The norm and the rotation make small numbers of large ones, so the bound of an element is proportional to the
    numbers it was computed from, not to the element itself.
    """

    value: Tensor
    error: Tensor
    unit: float

    def __mul__(self, other: Rounded) -> Rounded:
        error = self.error * other.size() + self.value.abs() * other.error
        return self._rounded(self.value * other.value, error)

    def __add__(self, other: Rounded) -> Rounded:
        return self._rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rounded) -> Rounded:
        return self + Rounded(-other.value, other.error, self.unit)

    def sum(self, *dims: int) -> Rounded:
        """Sum over `dims`, with a bound that holds for any order of the terms."""
        terms = math.prod(self.value.shape[dim] for dim in dims)
        error = (self.error + self.of_terms(terms) * self.size()).sum(dims, keepdim=True)
        return Rounded(self.value.sum(dims, keepdim=True), error, self.unit)

    def size(self) -> Tensor:
        return self.value.abs() + self.error

    def of_terms(self, n: int) -> float:
        """Return the error bound of a sum of n terms, relative to the sum of their absolute values."""
        return n * self.unit / (1 - n * self.unit)

    def _rounded(self, value: Tensor, error: Tensor) -> Rounded:
        return Rounded(value, error + self.unit * (value.abs() + error), self.unit)


def results_with_bounds(case: FusedCase, unit: float) -> dict[str, Rounded]:
    """Compute the `outcome` of a call in fp64 by hand, with error bounds for this unit; states get no gradient."""

    def given(x: Tensor) -> Rounded:
        return Rounded(x, torch.zeros_like(x), unit)

    cos, sin = given(case.cos.unsqueeze(2)), given(case.sin.unsqueeze(2))
    one_in_d = given(case.k.new_tensor(1 / case.k.shape[3]))

    def rotated(x: Rounded, sin: Rounded) -> Rounded:
        halved = zip(x.value.chunk(2, -1), x.error.chunk(2, -1), strict=True)
        low, high = (Rounded(value, error, unit) for value, error in halved)
        parts = low * cos - high * sin, high * cos + low * sin
        return Rounded(torch.cat([x.value for x in parts], -1), torch.cat([x.error for x in parts], -1), unit)

    def inverse_norm(x: Rounded) -> Rounded:
        mean = (x * x).sum(-1) * one_in_d + given(case.k.new_tensor(case.eps))
        value = mean.value.rsqrt()
        # A GPU computes the inverse square root to within two units in the last place, 4 units.
        return Rounded(value, (1 + 4 * unit) * (mean.value - mean.error).rsqrt() - value, unit)

    def finish(name: str, x: Rounded, scale: Tensor | None, upstream: Tensor) -> Rounded:
        """Store the result and the gradient of the scale; return the gradient of x."""
        gradient = rotated(given(upstream), Rounded(-sin.value, sin.error, unit))
        if scale is None:
            results[name] = rotated(x, sin)
            return gradient
        inverse = inverse_norm(x)
        normed = x * inverse
        results[name] = rotated(x * (inverse * given(scale)), sin)
        results[f"gradient of {name}_scale"] = (gradient * normed).sum(0, 1, 2)
        scaled = gradient * given(scale)
        along = (scaled * normed).sum(-1) * one_in_d
        return inverse * (scaled - normed * along)

    def through_shift(x: Tensor, coefficients: Tensor, state: Tensor | None) -> Rounded:
        size = _shift(x.abs(), coefficients.abs(), state if state is None else state.abs(), case)
        return Rounded(_shift(x, coefficients, state, case), given(x).of_terms(coefficients.shape[1]) * size, unit)

    def shifted(x: Tensor, coefficients: Tensor | None, state: Tensor | None) -> Rounded:
        return given(x) if coefficients is None else through_shift(x, coefficients, state)

    def back_through_shift(name: str, of_lags: str, gradient: Rounded) -> None:
        x, coefficients, state = (getattr(case, part) for part in (name, of_lags, f"{name}_state"))
        if coefficients is None:
            results[f"gradient of {name}"] = gradient
            return
        value, of_coefficients = _shift_backward(x, coefficients, state, case, gradient.value)
        sums = gradient.error + gradient.of_terms(coefficients.shape[1]) * gradient.size()
        error, _ = _shift_backward(x, coefficients.abs(), state, case, sums)
        sums = gradient.error + gradient.of_terms(max(1, x[:, :, 0].numel())) * gradient.size()
        _, their_error = _shift_backward(x.abs(), coefficients, state if state is None else state.abs(), case, sums)
        results[f"gradient of {name}"] = Rounded(value, error, unit)
        results[f"gradient of {of_lags}"] = Rounded(of_coefficients, their_error, unit)

    results: dict[str, Rounded] = {}
    if case.q_scale is not None:
        results["gradient of q_scale"] = given(torch.zeros_like(case.q_scale))
    if case.q is not None:
        q = shifted(case.q, case.gamma, case.q_state)
        back_through_shift("q", "gamma", finish("q", q, case.q_scale, case.grads[0]))
    k = shifted(case.k, case.alpha, case.k_state)
    back_through_shift("k", "alpha", finish("k", k, case.k_scale, case.grads[1]))
    results["v"] = shifted(case.v, case.beta, case.v_state)
    back_through_shift("v", "beta", given(case.grads[2]))
    return results


def _shift(x: Tensor, coefficients: Tensor, state: Tensor | None, case: FusedCase) -> Tensor:
    return shift_tokens(x, coefficients, state=state, **case.where(), backend="reference")[0]


def _shift_backward(
    x: Tensor, coefficients: Tensor, state: Tensor | None, case: FusedCase, gradient: Tensor
) -> tuple[Tensor, ...]:
    leaves = x.detach().clone().requires_grad_(), coefficients.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(_shift(*leaves, state, case), leaves, gradient, materialize_grads=True)


def assert_within_rounding(
    case: FusedCase, op: Callable[[FusedCase], tuple] = launched, *, unit: float | None = None
) -> dict[str, Tensor]:
    """Compare every element of every result with the reference: it may be off by rounding errors only.

    Args:
        op: Returns q, k and v.
        unit: Bound on the relative error of one operation; by default half a unit in the last place of the dtype in
            which the operator computes.
    """
    own = outcome(case, op)
    compute = torch.float64 if case.k.dtype == torch.float64 else torch.float32
    exact = case.map(lambda x: x.to(compute).double().contiguous())
    expected = outcome(exact, without_state)
    # The exact results are also computed in fp64, and have errors as large as results in fp64.
    places = torch.finfo(compute).eps * (1.0 if compute == torch.float64 else 0.5)
    bounds = results_with_bounds(exact, unit or places)
    assert own.keys() == expected.keys()
    for name, result in own.items():
        bound = bounds[name].error.reshape(result.shape)
        if result.dtype not in (compute, torch.float64):
            stored = torch.finfo(result.dtype)
            bound = bound + stored.eps / 2 * (expected[name].abs() + bound) + stored.smallest_normal * stored.eps / 2
        assert_close(name, result, expected[name], bound)
    return own
