"""Rotary embedding made together with the shift: the bits of one after the other, in one call or in many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvshift import KVShift, ShiftState
from kvshift.layers.positions import half_tables, rotate_half
from kvshift.ops import fused
from kvshift.ops.cpu import kernel as cpu_kernel

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
H, G, D, DV = 6, 3, 10, 7
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tables(rows: int, positions: int, dtype: torch.dtype, size: int = D) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, positions, size // 2).mul(6).repeat(1, 1, 2)
    return half_tables(angle.cos().to(dtype), angle.sin().to(dtype))


def inputs(batch: int, positions: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(batch, positions, heads, size).to(dtype) for heads, size in ((H, D), (G, D), (G, DV))]


def past(batch: int, dtype: torch.dtype, rows: int = 1) -> ShiftState:
    k, v = (torch.randn(batch, rows, G, size).to(dtype) for size in (D, DV))
    return ShiftState(k, v, rows)


@pytest.fixture
def counted(monkeypatch) -> list:
    """The calls that the kernel for one token took."""
    calls = []

    def count(*args, real=cpu_kernel.next_token_cpu):
        result = real(*args)
        calls.extend([result] if result is not None else [])
        return result

    monkeypatch.setattr(fused, "next_token_cpu", count)
    return calls


needs_kernel = pytest.mark.skipif(
    cpu_kernel.cpu_refusal(torch.empty(0), 2) is not None, reason="the CPU kernel is not built here"
)


@dtypes
def test_the_turn_has_the_bits_of_transformers(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angle = torch.rand(2, 5, D // 2).mul(6).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    x = torch.randn(2, 5, H, D).to(dtype)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    assert torch.equal(rotate_half(x, half_tables(cos, sin)), expected)


@pytest.mark.parametrize("targets", [(), ("k",), ("v",), ("k", "v"), ("q", "k", "v")], ids=str)
@pytest.mark.parametrize("positions", [1, 4])
def test_shift_then_turn(targets, positions):
    layer = KVShift(G, num_heads=H, targets=targets)
    q, k, v = inputs(2, positions, torch.float32)
    rotary = tables(2, positions, torch.float32)
    q_hat, k_hat, v_hat, _ = layer(q, k, v)
    turned = layer(q, k, v, rotary=rotary)
    for result, expected in zip(turned, (rotate_half(q_hat, rotary), rotate_half(k_hat, rotary), v_hat), strict=False):
        assert torch.equal(result, expected)


@needs_kernel
@dtypes
@pytest.mark.parametrize("targets", [(), ("k",), ("v",), ("k", "v")], ids=str)
@pytest.mark.parametrize(("batch", "angles"), [(1, 1), (3, 3), (3, 1)])
@torch.no_grad()
def test_one_token_in_one_call_has_the_bits_of_many(dtype, targets, batch, angles, counted):
    layer = KVShift(G, num_heads=H, targets=targets).to(torch.promote_types(dtype, torch.float32))
    q, k, v = inputs(batch, 1, dtype)
    rotary, state = tables(angles, 1, dtype), past(batch, dtype) if targets else None
    expected = layer(q, k, v, state=state, rotary=rotary, backend="eager")
    assert not counted
    results = layer(q, k, v, state=state, rotary=rotary)
    assert len(counted) == 1
    for result, other in zip(results[:3], expected[:3], strict=True):
        assert torch.equal(result, other)
    if targets:
        assert torch.equal(results[3].k, expected[3].k)
        assert torch.equal(results[3].v, expected[3].v)


@needs_kernel
@pytest.mark.parametrize(
    "case",
    ["strides of q", "strides of the state", "history of two rows", "window 3", "queries too", "gradients",
     "bfloat16 values", "double tables"],
)  # fmt: skip
def test_what_the_one_call_cannot_take_goes_through_many(case, counted):
    q, k, v = inputs(2, 1, torch.float32)
    rotary, state, options = tables(2, 1, torch.float32), past(2, torch.float32), {}
    if case == "strides of q":
        q = q.transpose(2, 3).contiguous().transpose(2, 3)
    elif case == "strides of the state":
        state = ShiftState(state.k.transpose(2, 3).contiguous().transpose(2, 3), state.v, 1)
    elif case == "history of two rows":
        state = past(2, torch.float32, rows=2)
    elif case == "window 3":
        state, options = past(2, torch.float32, rows=2), {"window": 3}
    elif case == "queries too":
        state = ShiftState(state.k, state.v, 1, torch.randn(2, 1, H, D))
        options = {"targets": ("q", "k", "v"), "num_heads": H}
    elif case == "double tables":
        rotary = tables(2, 1, torch.float64)
    layer = KVShift(G, **options)
    with torch.set_grad_enabled(case == "gradients"):
        if case == "bfloat16 values":
            with pytest.raises(ValueError, match="v must match k"):
                layer(q, k, v.bfloat16(), state=state, rotary=rotary)
        else:
            results = layer(q, k, v, state=state, rotary=rotary)
            expected = layer(q, k, v, state=state, rotary=rotary, backend="eager")
            for result, other in zip(results[:3], expected[:3], strict=True):
                assert torch.equal(result, other)
    assert not counted


@needs_kernel
@pytest.mark.parametrize("constraint", ["gate", "clamp"])
@torch.no_grad()
def test_coefficients_under_a_constraint_go_in_one_call_too(constraint, counted):
    layer = KVShift(G, constraint=constraint)
    arguments = {"state": past(2, torch.float32), "rotary": tables(2, 1, torch.float32)}
    given = inputs(2, 1, torch.float32)
    results = layer(*given, **arguments)
    for result, other in zip(results[:3], layer(*given, **arguments, backend="eager"), strict=False):
        assert torch.equal(result, other)
    assert counted


@pytest.mark.parametrize("turned", [True, False], ids=["turned", "not turned"])
@pytest.mark.parametrize("kernel", [pytest.param(True, marks=needs_kernel), False], ids=["kernel", "no kernel"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("k of fewer rows", ValueError, "v must match k"),
        ("v of fewer rows", ValueError, "v must match k"),
        ("v of fewer heads", ValueError, "v must match k"),
        ("k and v of one head", ValueError, "alpha must be .* with 1 heads"),
        ("k and v of more heads", ValueError, "alpha must be .* with 5 heads"),
        ("state of fewer rows", ValueError, r"state\.k must be \(2, rows, 3, 10\)"),
        ("state of more rows than it may keep", ValueError, "state must hold as many keys as values, max_rows at most"),
        ("k without heads", ValueError, "k must have 4 dimensions"),
        ("v in double precision", ValueError, "v must match k"),
        ("k as a list", TypeError, "k must be a tensor"),
        ("v as a list", TypeError, "v must be a tensor"),
    ],
)
@torch.no_grad()
def test_decoding_names_what_disagrees(change, error, message, kernel, turned, monkeypatch):
    if not kernel:
        monkeypatch.setattr(fused, "next_token_cpu", lambda *_: None)
    q, k, v = inputs(2, 1, torch.float32)
    state = past(2, torch.float32)
    if change == "k of fewer rows":
        k, state = k[:1], ShiftState(state.k[:1], state.v, 1)
    elif change == "v of fewer rows":
        v, state = v[:1], ShiftState(state.k, state.v[:1], 1)
    elif change == "v of fewer heads":
        v, state = v[:, :, :2].contiguous(), ShiftState(state.k, state.v[:, :, :2].contiguous(), 1)
    elif change in ("k and v of one head", "k and v of more heads"):
        heads = [0] if "one" in change else [0, 1, 2, 1, 0]
        k, v, state = k[:, :, heads], v[:, :, heads], ShiftState(state.k[:, :, heads], state.v[:, :, heads], 1)
    elif change == "state of fewer rows":
        state = ShiftState(state.k[:1], state.v[:1], 1)
    elif change == "state of more rows than it may keep":
        k, v, q = (x.repeat(1, 2, 1, 1) for x in (k, v, q))
        state = ShiftState(k, v, 1)
    elif change == "k without heads":
        k, state = k[:, :, 0], ShiftState(state.k[:, :, 0], state.v, 1)
    elif change == "v in double precision":
        v, state = v.double(), ShiftState(state.k, state.v.double(), 1)
    elif change == "k as a list":
        k = k.tolist()
    elif change == "v as a list":
        v = v.tolist()
    with pytest.raises(error, match=message):
        KVShift(G)(q, k, v, state=state, rotary=tables(2, 1, torch.float32) if turned else None)


@needs_kernel
@pytest.mark.parametrize("targets", [(), ("k", "v")], ids=str)
@torch.no_grad()
def test_queries_of_other_rows_are_turned_as_in_many_calls(targets, counted):
    """Not a case of attention, but of memory: nothing is read that is not there."""
    layer, rotary = KVShift(G, targets=targets), tables(1, 1, torch.float32)
    (_, k, v), (q, *_) = inputs(5, 1, torch.float32), inputs(2, 1, torch.float32)
    state = past(5, torch.float32) if targets else None
    results = layer(q, k, v, state=state, rotary=rotary)
    expected = layer(q, k, v, state=state, rotary=rotary, backend="eager")
    for result, other in zip(results[:3], expected[:3], strict=True):
        assert torch.equal(result, other)
    assert not counted


@torch.no_grad()
def test_decoding_without_the_kernel(monkeypatch, tmp_path, counted):
    layer, (q, k, v) = KVShift(G), inputs(2, 1, torch.float32)
    rotary, state = tables(2, 1, torch.float32), past(2, torch.float32)
    expected = layer(q, k, v, state=state, rotary=rotary)
    counted.clear()
    monkeypatch.setattr(cpu_kernel, "__file__", str(tmp_path / "kernel.py"))
    cpu_kernel._kernels.cache_clear()
    try:
        results = layer(q, k, v, state=state, rotary=rotary)
    finally:
        cpu_kernel._kernels.cache_clear()
    assert not counted
    for result, other in zip(results[:3], expected[:3], strict=True):
        assert torch.equal(result, other)


def test_the_gradient_goes_through_the_turn():
    layer = KVShift(G).double()
    q, k, v = (x.requires_grad_() for x in inputs(2, 3, torch.float64))
    rotary = tables(2, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: layer(*x, rotary=rotary)[:3], (q, k, v))
