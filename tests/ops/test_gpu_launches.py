"""Decoding and the rotary embedding in one launch on a CUDA device: the step of a token, CUDA graphs, rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.ops import shift_tokens
from kvshift.ops.triton.call import Boundaries, shift_norm_rope_triton

from .cases import normal_numbers
from .device import DEVICE, MARKS, carry, needs_cuda
from .test_triton_step import a_call

pytestmark = MARKS


def a_call_there(**options: Any) -> Any:
    call = a_call(**options)
    return call.with_(**{name: x.to(DEVICE) for name, x in call.tensors.items() if isinstance(x, Tensor)})


CHANGED = ("k_state", "v_state", "k_cache", "v_cache")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_on_the_device_is_the_split_of_the_whole(dtype):
    """One token after a state: what `shift_norm_rope_triton` gives, bit for bit; without a slot nothing is written."""
    call = a_call_there(window=3, rows=2, dtype=dtype, norm=True, tables=5)
    before = call.copy()
    q_out = call.run()
    for b, (slot, place) in enumerate(zip(before["state_slots"].tolist(), before["cache_slots"].tolist(), strict=True)):
        if slot < 0:
            assert not q_out[b].any()
            continue
        row = slice(b, b + 1)
        q, k, v = shift_norm_rope_triton(
            *(before[name][row] for name in ("q", "k", "v")),
            *(before[name] for name in ("alpha", "beta")),
            *(before[name][row] for name in ("cos", "sin")),
            **{name: before[name] for name in ("q_scale", "k_scale", "eps")},
            k_state=before["k_state"][slot : slot + 1],
            v_state=before["v_state"][slot : slot + 1],
        )
        assert torch.equal(q_out[row], q)
        if place >= 0:
            assert torch.equal(call["k_cache"][place // 8, place % 8], k[0, 0])
            assert torch.equal(call["v_cache"][place // 8, place % 8], v[0, 0])
        assert torch.equal(call["k_state"][slot, -1], before["k"][b, 0])
    unused = [s for s in range(8) if s not in before["state_slots"].tolist()]
    assert torch.equal(call["v_state"][unused], before["v_state"][unused])


def test_the_step_keeps_the_rules_of_torch_library():
    call = a_call_there(norm=True)
    names = ("q", "k", "v", "alpha", "beta", "cos", "sin", *CHANGED, "state_slots", "cache_slots")
    arguments = (*(call[name] for name in names), False, call["q_scale"], call["k_scale"], 0.1)
    torch.library.opcheck(torch.ops.kvshift.step.default, arguments)


@needs_cuda
def test_a_cuda_graph_decodes():
    """Step after step in place; slots are data."""
    static = a_call_there(window=3, rows=2, norm=True)
    eager = static.copy()
    static.copy().run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q_out = static.run()
    for seed in (2, 3, 5):
        generator = torch.Generator().manual_seed(seed)
        for name in ("q", "k", "v"):
            numbers = torch.randn(eager[name].shape, generator=generator)
            for call in (static, eager):
                call[name].copy_(numbers)
        for call in (static, eager):
            call["state_slots"].copy_(call["state_slots"].roll(1))
            call["cache_slots"].copy_((call["cache_slots"] + 7) % 32)
        graph.replay()
        assert torch.equal(q_out, eager.run())
        for name in CHANGED:
            assert torch.equal(static[name], eager[name]), name


def rotated_plainly(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, cos: Tensor, sin: Tensor, scales: tuple, bounds: dict
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula of `shift_norm_rope_triton`, each operation in the dtype of its arguments."""
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
    """Error against the formula in fp64, on the whole, that of one operation after another in this dtype at the most.

    But for one unit, of a sum of N terms sqrt(N) of them: what is rounded once may by chance be rounded worse.
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
            found = Boundaries.of(bounds, None, None)
            outputs = shift_norm_rope_triton(*five, cos, sin, **scales, eps=0.1 if norm else 0.0, boundaries=found)
        given = torch.autograd.grad(outputs, list(leaves.values()), grads)
        names = ["q_out", "k_out", "v_out", *(f"gradient of {name}" for name in leaves)]
        return {name: x.detach().double().cpu() for name, x in zip(names, (*outputs, *given), strict=True)}

    exact, own, plain = run("plain", torch.float64), run("triton"), run("plain")
    for name, result in own.items():
        if dtype == torch.float64:
            torch.testing.assert_close(result, exact[name], rtol=1e-12, atol=1e-12)
            continue
        is_sum = name in ("gradient of alpha", "gradient of beta")  # over all tokens and elements, in float32
        unit = torch.finfo(torch.float32 if is_sum else dtype).eps * (batch * positions * size if is_sum else 1) ** 0.5
        own_error, plain_error = ((x - exact[name]).square().mean().sqrt() for x in (result, plain[name]))
        assert own_error <= plain_error + unit * exact[name].square().mean().sqrt(), name
