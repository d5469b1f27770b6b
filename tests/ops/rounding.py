"""Bounds on how far a result may be from the exact one: one rounding error.

The exact result is that of the reference in fp64 on the same numbers. A result in fp32 is a sum of n products, with
one rounding per operation, in any order, with or without fused multiply-add. Its error is at most

    n * u / (1 - n * u) * (|a1 * x1| + ... + |an * xn|),    u = 2^-24

(Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). A result in bf16 or fp16 is that sum rounded
once more, by half a unit in its last place. The reference, applied to the absolute values of all inputs, computes
the sums of absolute values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvshift.ops import kv_shift

from .cases import Case, outcome


def assert_within_one_rounding(case: Case, backend: str, *, through_state: bool, op: Callable = kv_shift) -> None:
    """Compare every result and every gradient with the exact one, element by element.

    Autograd adds a gradient through the new state to the one through the output in the dtype of the input, which is one
    more rounding. The results of the reference are compared, too, but its gradients only in fp64 and fp32.
    """
    compute = torch.float64 if case.k.dtype == torch.float64 else torch.float32
    wide = case.map(lambda x: x.to(compute).double().contiguous())
    exact = outcome(wide, "reference", through_state=through_state)
    sizes = outcome(wide.map(torch.abs), "reference", through_state=through_state)
    results = outcome(case, backend, through_state=through_state, op=op)
    assert results.keys() == exact.keys()
    for name, result in results.items():
        if backend == "reference" and compute != case.k.dtype and name.startswith("gradient"):
            continue  # autograd rounds each of the terms
        if name.startswith("new_state"):  # keys and values, unchanged
            assert torch.equal(result.double(), exact[name]), name
            continue
        terms, roundings = case.window, 1
        if name in ("gradient of alpha", "gradient of beta"):
            terms = max(1, (case.k if "alpha" in name else case.v)[:, :, 0].numel())
        elif name.startswith("gradient") and through_state:
            roundings = 2
        bound = rounding_bound(exact[name], sizes[name], terms, roundings, compute, result.dtype)
        assert_close(name, result, exact[name], bound)


def rounding_bound(
    exact: Tensor, size: Tensor, terms: int, roundings: int, compute: torch.dtype, stored: torch.dtype
) -> Tensor:
    """Return the error bound of sums of `terms` products that are computed in one dtype and stored in another."""
    unit = torch.finfo(compute).eps / 2
    if compute == torch.float64:
        terms = 2 * terms  # the exact result is also in fp64, with errors as large
    if stored == compute:
        terms += roundings - 1
    bound = terms * unit / (1 - terms * unit) * size
    if stored != compute and stored != torch.float64:
        half_a_place = torch.finfo(stored).eps / 2
        bound = bound * (1 + half_a_place) + half_a_place * (exact.abs() + (roundings - 1) * size)
        smallest_subnormal = torch.finfo(stored).smallest_normal * torch.finfo(stored).eps
        bound = bound + roundings * smallest_subnormal / 2
    return bound


def assert_close(name: str, result: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Fail and name the first element that is out of bounds, NaN included."""
    assert result.shape == exact.shape, f"{name} is {tuple(result.shape)}, not {tuple(exact.shape)}"
    off = ~((result.double() - exact).abs() <= bound)
    if off.any():
        where = tuple(off.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(off.sum())} of {off.numel()} elements are off; the first is {where}: "
            f"{result[where].item()!r}, exactly {exact[where].item()!r}, allowed {bound[where].item():.3g}"
        )
