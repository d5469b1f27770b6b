"""Check that an implementation computes the shift; if it does not, it is not timed.

It runs at the shape that is timed, with incoming gradients that are zero except on two slices: the first tokens of the
first sequence, and the last tokens of the last sequence. Its results on the slices are compared element by element with
`kv_shift(backend="reference")` in float64; elsewhere gradients must be zero.

Shapes: B batch, T positions, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvshift.ops import ShiftState, kv_shift
from kvshift.ops.rope import rotate_half
from kvshift_lab.benchmarks.formulations import Formulation, Table

_SLICE = 32  # positions
_TERMS = 512  # bounds the depth of sums over tokens, which are computed in blocks or as a tree


@dataclass(frozen=True)
class ParityResult:
    """The result of a parity check.

    Attributes:
        problem: description of the first mismatch, or None.
        worst: the largest |y - exact| / (|exact| + 1) of the results.
    """

    problem: str | None
    worst: float


@dataclass(frozen=True)
class _Span:
    """Positions first ... first + count - 1 of one sequence, with the position before them."""

    sequence: int
    first: int
    count: int

    def cut(self, x: Tensor) -> Tensor:
        return x[self.sequence : self.sequence + 1, self.first : self.first + self.count]

    def before(self, x: Tensor) -> Tensor:
        return x[self.sequence : self.sequence + 1, max(0, self.first - 1) : self.first]


def check_formulation(
    formulation: Formulation,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    backward: bool,
    table: Table | None = None,
) -> ParityResult:
    """Compare a formulation with the reference.

    The error of an element may be as large as `formulation.roundings` times u (the unit roundoff of the dtype) times
    the sum of the absolute values of its terms, plus the error of sums in float32.

    Args:
        shape: (B, T, G, D) of k and of v.
        backward: also check all gradients; otherwise only the results, without autograd.
        table: cosines and sines of the rotary embedding, if the formulation rotates k.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    k, v = (draw(*shape).to(dtype).requires_grad_(backward) for _ in range(2))
    if formulation.fixed is None:
        coefficients = [draw(shape[2], 2) for _ in range(2)]
    else:
        coefficients = [torch.tensor([formulation.fixed] * shape[2], device=device) for _ in range(2)]
    weights = [formulation.weights(coefficient, k.detach()).detach() for coefficient in coefficients]
    if formulation.fixed is None:
        coefficients = [
            coefficient.to(weight.dtype) for coefficient, weight in zip(coefficients, weights, strict=True)
        ]  # the rounded coefficients that the formulation uses
        weights = [weight.requires_grad_(backward) for weight in weights]
    spans = _spans(shape)
    grads = [torch.zeros_like(k) for _ in range(2)]
    for grad in grads:
        for span in spans:
            span.cut(grad).copy_(draw(1, span.count, *shape[2:]))

    found: dict[str, Tensor] = {}
    with torch.set_grad_enabled(backward):
        results = formulation.function(k, v, *weights)
    found |= dict(zip(("k_hat", "v_hat"), (result.detach() for result in results), strict=True))
    if backward:
        leaves = {"gradient of k": k, "gradient of v": v}
        if formulation.fixed is None:
            leaves |= {"gradient of alpha": weights[0], "gradient of beta": weights[1]}
        found |= dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), grads), strict=True))
        for name in [name for name in found if name.endswith(("alpha", "beta"))]:
            found[name] = formulation.coefficient_grad(found[name], shape[2])
    return _compare(formulation, found, (k.detach(), v.detach()), coefficients, grads, spans, table)


def _spans(shape: tuple[int, ...]) -> list[_Span]:
    batch, length = shape[:2]
    if batch == 1 and length <= 2 * _SLICE + 1:
        return [_Span(0, 0, length)]
    count = min(_SLICE, length)
    return [_Span(0, 0, count), _Span(batch - 1, length - count, count)]


def _compare(
    formulation: Formulation,
    found: dict[str, Tensor],
    inputs: tuple[Tensor, Tensor],
    coefficients: list[Tensor],
    grads: list[Tensor],
    spans: list[_Span],
    table: Table | None,
) -> ParityResult:
    unit = torch.finfo(inputs[0].dtype).eps / 2
    coefficient_unit = torch.finfo(formulation.weights(coefficients[0], inputs[0]).dtype).eps / 2
    single = torch.finfo(torch.float32).eps / 2
    exact_sums: dict[str, Any] = dict.fromkeys(("gradient of alpha", "gradient of beta"), 0.0)
    size_sums = dict(exact_sums)
    worst, problem = 0.0, None

    def judge(name: str, result: Tensor, exact: Tensor, bound: Tensor) -> None:
        nonlocal worst, problem
        result = result.cpu()
        error = (result.double() - exact).abs()
        if name.endswith("_hat"):
            worst = max(worst, float((error / (exact.abs() + 1)).max()))
        off = ~(error <= bound)
        if off.any() and problem is None:
            at = tuple(off.nonzero()[0].tolist())
            problem = f"{name}: {int(off.sum())} of {off.numel()} elements off, first {at}: {float(result[at]):.6g}"
            problem += f" instead of {float(exact[at]):.6g}"

    for span in spans:
        exact = _reference(span, inputs, coefficients, grads, table, formulation.boundaries)
        sizes = _reference(
            span,
            tuple(x.abs() for x in inputs),
            [coefficient.abs() for coefficient in coefficients],
            [grad.abs() for grad in grads],
            None if table is None else tuple(part.abs() for part in table),
            formulation.boundaries,
        )
        for name, value in exact.items():
            if name not in found:
                continue
            if name in exact_sums:
                exact_sums[name] = exact_sums[name] + value
                size_sums[name] = size_sums[name] + sizes[name]
                continue
            result = span.cut(found[name])
            if name.startswith("gradient"):
                result = torch.cat([span.before(found[name]), result], dim=1)
            judge(name, result, value, (formulation.roundings * unit + 8 * single) * 1.01 * sizes[name])
    for name, value in exact_sums.items():
        if name in found:
            # The last rounding is to the dtype of the coefficients; all others are to that of the products.
            bound = (formulation.roundings - 1) * unit + coefficient_unit + _TERMS * single
            judge(name, found[name], value, bound * 1.01 * size_sums[name])
    for name in ("gradient of k", "gradient of v"):
        if name in found and problem is None:
            rest = found[name].clone()
            for span in spans:
                span.cut(rest).zero_()
                span.before(rest).zero_()
            if int(rest.count_nonzero()):
                problem = f"{name}: not zero where the incoming gradient is zero"
    return ParityResult(problem, worst)


def _reference(
    span: _Span,
    inputs: tuple[Tensor, ...],
    coefficients: list[Tensor],
    grads: list[Tensor],
    table: Any,
    boundaries: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return results and gradients at one span in float64; gradients of k and v begin at the position before the span.

    They are computed on the CPU, where a loop of small operations needs no kernel launches.
    """
    k, v = (span.cut(x).cpu().double().requires_grad_() for x in inputs)
    alpha, beta = (coefficient.cpu().double().requires_grad_() for coefficient in coefficients)
    before = [span.before(x).cpu().double().requires_grad_() for x in inputs]
    state = ShiftState(before[0], before[1], 1) if span.first else None
    where: dict[str, Any] = {name: span.cut(x).cpu() for name, x in boundaries.items()}
    k_hat, v_hat, _ = kv_shift(k, v, alpha, beta, state=state, backend="reference", **where)
    if table is not None:
        k_hat = _rotate(k_hat, span, table)
    leaves = [k, v, alpha, beta, *(before if span.first else [])]
    outer = [span.cut(grad).cpu().double() for grad in grads]
    gradients = list(torch.autograd.grad((k_hat, v_hat), leaves, outer))
    before = gradients[4:] if span.first else [gradients[0][:, :0], gradients[1][:, :0]]
    return {
        "k_hat": k_hat.detach(),
        "v_hat": v_hat.detach(),
        "gradient of k": torch.cat([before[0], gradients[0]], dim=1),
        "gradient of v": torch.cat([before[1], gradients[1]], dim=1),
        "gradient of alpha": gradients[2],
        "gradient of beta": gradients[3],
    }


def _rotate(k: Tensor, span: _Span, table: Table) -> Tensor:
    cos, sin = (part[:, span.first : span.first + span.count].cpu().double() for part in table)
    return rotate_half(k, (cos, sin))
