"""How far a result may lie from the exact one: as far as one rounding takes it, and no farther.

The exact result is the reference in fp64 on the very numbers of the case. A result in fp32 is a sum of n products,
each operation rounded once, in whatever order, with or without fused multiply-add: it errs by at most

    n * u / (1 - n * u) * (|a1 * x1| + ... + |an * xn|),    u = 2^-24

(Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). A result in bf16 or fp16 is that sum rounded
once more: by half a unit in its last place. The sums of absolute values are the reference again, on the absolute
values of everything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvshift.ops import kv_shift

from .cases import Case, outcome


def assert_within_one_rounding(case: Case, backend: str, *, through_state: bool, op: Callable = kv_shift) -> None:
    """Compare every result and every gradient with the exact one, element by element.

    A gradient that comes back through the new state is added by autograd to the one through the output, in the dtype
    of the input: one more rounding. The results of the reference are compared too, its gradients only in fp64 and fp32.
    """
    compute = torch.float64 if case.k.dtype == torch.float64 else torch.float32
    wide = case.map(lambda x: x.to(compute).double().contiguous())
    exact = outcome(wide, "reference", through_state=through_state)
    sizes = outcome(wide.map(torch.abs), "reference", through_state=through_state)
    results = outcome(case, backend, through_state=through_state, op=op)
    assert results.keys() == exact.keys()
    for name, result in results.items():
        if backend == "reference" and compute != case.k.dtype and name.startswith("gradient"):
            continue  # autograd rounds each of its terms
        if name.startswith("new_state"):  # keys and values as they came
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
    """The error allowed to sums of `terms` products, computed in one dtype and stored in another."""
    unit = torch.finfo(compute).eps / 2
    if compute == torch.float64:
        terms = 2 * terms  # the exact result is in fp64 too, and errs as much
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
    """Fail with the place of the first element that is off, NaN included."""
    assert result.shape == exact.shape, f"{name} is {tuple(result.shape)}, not {tuple(exact.shape)}"
    off = ~((result.double() - exact).abs() <= bound)
    if off.any():
        where = tuple(off.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(off.sum())} of {off.numel()} elements are off; the first is {where}: "
            f"{result[where].item()!r}, exactly {exact[where].item()!r}, allowed {bound[where].item():.3g}"
        )
