"""Rounding of shift, norm and rotary embedding in one launch on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvshift.ops import shift_tokens
from kvshift.ops.arguments import Call
from kvshift.ops.shift import with_plan
from kvshift.ops.triton.call import shift_triton

from .cases import normal_numbers
from .device import DEVICE, MARKS, carry

pytestmark = MARKS


def rotated_plainly(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, cos: Tensor, sin: Tensor, scales: tuple, bounds: dict
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the formula of `shift_triton`, with each operation in the dtype of its arguments."""
    k = shift_tokens(k, alpha, backend="eager", **bounds)[0]
    v = shift_tokens(v, beta, backend="eager", **bounds)[0]
    rotated = []
    for x, scale in zip((q, k), scales or (None, None), strict=True):
        if scale is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1) * scale
        low, high = x.chunk(2, -1)
        c, s = cos.unsqueeze(2).to(x.dtype), sin.unsqueeze(2).to(x.dtype)
        rotated.append(torch.cat([low * c - high * s, high * c + low * s], -1))
    return *rotated, v


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("packed", [False, True], ids=["sequences", "pack"])
def test_shift_norm_and_rotation_in_one_launch(packed, norm, dtype):
    """The RMS error against the formula in fp64 is at most that of separate operations in this dtype.

    One unit is added, or sqrt(N) units for a sum of N terms: by chance, a single rounding can have the larger error.
    """
    normal = normal_numbers(19, dtype)
    batch, positions, heads, groups, size = (1 if packed else 2), 9, 5, 3, 6
    angles = normal(1, positions, size // 2, dtype=torch.float64)
    inputs = {
        "q": normal(batch, positions, heads, size),
        "k": normal(batch, positions, groups, size),
        "v": normal(batch, positions, groups, 7),
        "alpha": normal(groups, 2).float().to(torch.promote_types(dtype, torch.float32)),
        "beta": normal(groups, 2).float().to(torch.promote_types(dtype, torch.float32)),
        **({"q_scale": normal(size), "k_scale": normal(size)} if norm else {}),
    }
    tables = [x.to(dtype) for x in (angles.cos(), angles.sin())]
    gradients = [normal(*inputs[name].shape) for name in ("q", "k", "v")]
    pack = torch.tensor([0, 4, 4, 5, 9], dtype=torch.int32) if packed else None

    def run(op: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        leaves = {
            name: carry(x if dtype is None else x.to(dtype), DEVICE).requires_grad_() for name, x in inputs.items()
        }
        cos, sin, *grads = ((x if dtype is None else x.to(dtype)).to(DEVICE) for x in (*tables, *gradients))
        five = [leaves[name] for name in ("q", "k", "v", "alpha", "beta")]
        scales = {name: leaves[name] for name in leaves if "scale" in name}
        bounds = None if pack is None else pack.to(DEVICE)
        if op == "plain":
            outputs = rotated_plainly(*five, cos, sin, tuple(scales.values()), {"cu_seqlens": bounds})
        else:
            eps = 0.1 if norm else 0.0
            call = Call(*five, cos=cos, sin=sin, **scales, cu_seqlens=bounds, eps=eps, max_rows=0)
            outputs = shift_triton(with_plan(call), batch)[:3]
        given = torch.autograd.grad(outputs, list(leaves.values()), grads)
        names = ["q_out", "k_out", "v_out", *(f"gradient of {name}" for name in leaves)]
        return {name: x.detach().double().cpu() for name, x in zip(names, (*outputs, *given), strict=True)}

    exact, own, plain = run("plain", torch.float64), run("triton"), run("plain")
    for name, result in own.items():
        if dtype == torch.float64:
            torch.testing.assert_close(result, exact[name], rtol=1e-12, atol=1e-12)
            continue
        is_sum = name in ("gradient of alpha", "gradient of beta")  # sums over all tokens and elements in float32
        unit = torch.finfo(torch.float32 if is_sum else dtype).eps * (batch * positions * size if is_sum else 1) ** 0.5
        own_error, plain_error = ((x - exact[name]).square().mean().sqrt() for x in (result, plain[name]))
        assert own_error <= plain_error + unit * exact[name].square().mean().sqrt(), name
