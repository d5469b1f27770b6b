"""Rounding of shift, norm and rotary embedding in one launch on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvshift.ops import shift_tokens

from .cases import SUMS
from .device import MARKS, there
from .fused_cases import FusedCase, Outputs, launched, outcome, random_fused

pytestmark = MARKS


def rotated_plainly(case: FusedCase) -> Outputs:
    """Compute the formula of `shift_triton`, with each operation in the dtype of its arguments."""
    k = shift_tokens(case.k, case.alpha, backend="eager", **case.where())[0]
    v = shift_tokens(case.v, case.beta, backend="eager", **case.where())[0]
    rotated = []
    for x, scale in ((case.q, case.q_scale), (k, case.k_scale)):
        if scale is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.eps) * scale
        low, high = x.chunk(2, -1)
        cos, sin = case.cos.unsqueeze(2), case.sin.unsqueeze(2)
        rotated.append(torch.cat([low * cos - high * sin, high * cos + low * sin], -1))
    return *rotated, v


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("shape", [{"batch": 2, "positions": 9}, {"lengths": [4, 0, 1, 4]}], ids=["sequences", "pack"])
def test_shift_norm_and_rotation_in_one_launch(shape, norm, dtype):
    """The RMS error against the formula in fp64 is at most that of separate operations in this dtype.

    One unit is added, or sqrt(N) units for a sum of N terms: by chance, a single rounding can have the larger error.
    """
    case = random_fused(19, dtype=dtype, norm=norm, **shape)
    exactly = case.map(lambda x: x.double())

    def run(case: FusedCase, op: Callable[[FusedCase], Outputs]) -> dict[str, Tensor]:
        return {name: x.double().cpu() for name, x in outcome(there(case), op).items()}

    exact = run(exactly, rotated_plainly)
    if dtype == torch.float64:
        for name, result in run(exactly, launched).items():
            torch.testing.assert_close(result, exact[name], rtol=1e-12, atol=1e-12)
        return
    own, plain = run(case, launched), run(case, rotated_plainly)
    for name, result in own.items():
        is_sum = name in SUMS  # over all tokens and elements, in float32
        terms = case.k[:, :, 0].numel() if is_sum else 1
        unit = torch.finfo(torch.float32 if is_sum else dtype).eps * terms**0.5
        own_error, plain_error = ((x - exact[name]).square().mean().sqrt() for x in (result, plain[name]))
        assert own_error <= plain_error + unit * exact[name].square().mean().sqrt(), name
