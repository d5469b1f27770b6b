"""Rotary embedding made together with the shift: the bits of one after the other, in one call or in many."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from kvshift import KVShift, ShiftOptions, ShiftState
from kvshift.layers.positions import half_tables, rotate_half
from kvshift.ops import attention_inputs, decode
from kvshift.ops.decode import columns_of
from tests.covering import covering

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
H, G, D, DV = 6, 3, 10, 7
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tables(rows: int, positions: int, dtype: torch.dtype, size: int = D) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, positions, size // 2).mul(6).repeat(1, 1, 2)
    return half_tables(angle.cos().to(dtype), angle.sin().to(dtype))


def inputs(batch: int, positions: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(batch, positions, heads, size).to(dtype) for heads, size in ((H, D), (G, D), (G, DV))]


def state_of(batch: int, dtype: torch.dtype, rows: int = 1) -> ShiftState:
    k, v = (torch.randn(batch, rows, G, size).to(dtype) for size in (D, DV))
    return ShiftState(k, v, rows)


@pytest.fixture
def counted(monkeypatch) -> list:
    """The calls that were taken as the next token of generation."""
    calls = []

    def count(*args, real=attention_inputs.next_token, **options):
        calls.append(args)
        return real(*args, **options)

    monkeypatch.setattr(attention_inputs, "next_token", count)
    return calls


@dtypes
def test_the_rotation_has_the_bits_of_transformers(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angle = torch.rand(2, 5, D // 2).mul(6).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    x = torch.randn(2, 5, H, D).to(dtype)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    assert torch.equal(rotate_half(x, half_tables(cos, sin)), expected)


@pytest.mark.parametrize("targets", [(), ("k",), ("v",), ("k", "v"), ("q", "k", "v")], ids=str)
@pytest.mark.parametrize("positions", [1, 4])
def test_shift_then_rotate(targets, positions):
    layer = KVShift(G, ShiftOptions(targets=targets), num_heads=H)
    q, k, v = inputs(2, positions, torch.float32)
    rotary = tables(2, positions, torch.float32)
    q_hat, k_hat, v_hat, _ = layer(q, k, v)
    rotated = layer(q, k, v, rotary=rotary)
    for result, expected in zip(rotated, (rotate_half(q_hat, rotary), rotate_half(k_hat, rotary), v_hat), strict=False):
        assert torch.equal(result, expected)


@covering(dtype=DTYPES, targets=[(), ("k",), ("v",), ("k", "v")], rows=[(1, 1), (3, 3), (3, 1)])
@torch.no_grad()
def test_the_next_token_has_the_bits_of_one_step_after_the_other(dtype, targets, rows, counted):
    batch, angles = rows
    layer = KVShift(G, ShiftOptions(targets=targets), num_heads=H).to(torch.promote_types(dtype, torch.float32))
    q, k, v = inputs(batch, 1, dtype)
    rotary, state = tables(angles, 1, dtype), state_of(batch, dtype) if targets else None
    expected = layer(q, k, v, state=state, rotary=rotary, backend="eager")
    assert not counted
    results = layer(q, k, v, state=state, rotary=rotary)
    assert len(counted) == 1
    for result, other in zip(results[:3], expected[:3], strict=True):
        assert torch.equal(result, other)
    if targets:
        assert torch.equal(results[3].k, expected[3].k)
        assert torch.equal(results[3].v, expected[3].v)


@pytest.mark.parametrize(
    ("case", "is_next"),
    [("strides of q", True), ("strides of the state", True), ("double tables", True), ("a zero", True),
     ("state of two rows", False), ("window 3", False), ("queries too", False), ("gradients", False),
     ("no state", False), ("bfloat16 values", False)],
)  # fmt: skip
def test_what_is_taken_as_the_next_token(case, is_next, counted):
    q, k, v = inputs(2, 1, torch.float32)
    rotary, state, options = tables(2, 1, torch.float32), state_of(2, torch.float32), {}
    if case == "strides of q":
        q = q.transpose(2, 3).contiguous().transpose(2, 3)
    elif case == "strides of the state":
        state = ShiftState(state.k.transpose(2, 3).contiguous().transpose(2, 3), state.v, 1)
    elif case == "state of two rows":
        state = state_of(2, torch.float32, rows=2)
    elif case == "window 3":
        state, options = state_of(2, torch.float32, rows=2), {"window": 3}
    elif case == "queries too":
        state = ShiftState(state.k, state.v, 1, torch.randn(2, 1, H, D))
        options = {"targets": ("q", "k", "v"), "num_heads": H}
    elif case == "double tables":
        rotary = tables(2, 1, torch.float64)
    elif case == "no state":
        state = None
    heads = options.pop("num_heads", None)
    layer = KVShift(G, ShiftOptions(**options), num_heads=heads)
    if case == "a zero":
        layer.alpha.data[1, 1] = layer.beta.data[0, 0] = 0
        state.k[0, 0, 1] = v[1, 0, 0] = torch.inf
    with torch.set_grad_enabled(case == "gradients"):
        if case == "bfloat16 values":
            with pytest.raises(ValueError, match="v must match k"):
                layer(q, k, v.bfloat16(), state=state, rotary=rotary)
        else:
            results = layer(q, k, v, state=state, rotary=rotary)
            expected = layer(q, k, v, state=state, rotary=rotary, backend="eager")
            for result, other in zip(results[:3], expected[:3], strict=True):
                assert torch.equal(result, other)
                assert result.isfinite().all()
    assert bool(counted) is is_next


@pytest.mark.parametrize(
    "change", ["in place", "by .data", "from zero by .data", "another parameter", "another dtype", "a copy", "loaded"]
)
@torch.no_grad()
def test_the_next_token_takes_the_coefficients_as_they_are_now(change, counted):
    """What is kept from token to token are views."""
    layer, given = KVShift(G), inputs(2, 1, torch.float32)
    arguments = {"state": state_of(2, torch.float32), "rotary": tables(2, 1, torch.float32)}
    if change == "from zero by .data":
        layer.alpha[1, 1] = 0
    first = layer(*given, **arguments)
    if change == "in place":
        layer.alpha.mul_(3)
    elif change == "by .data":
        layer.alpha.data.mul_(3)
    elif change == "from zero by .data":
        layer.alpha.data[1, 1] = 0.5
    elif change == "another parameter":
        layer.alpha = torch.nn.Parameter(layer.alpha * 3)
    elif change == "another dtype":
        layer.double().alpha.mul_(3)
    elif change == "a copy":
        layer = copy.deepcopy(layer)
        layer.alpha.mul_(3)
    elif change == "loaded":
        layer.load_state_dict({"alpha": layer.alpha * 3, "beta": layer.beta.clone()}, assign=True)
    second = layer(*given, **arguments)
    assert len(counted) == 2
    expected = layer(*given, **arguments, backend="eager")
    assert not torch.equal(second[1], first[1])
    for result, other in zip(second[:3], expected[:3], strict=True):
        assert torch.equal(result, other)


@pytest.mark.parametrize("change", ["in place", "another parameter", "another dtype", "a copy", "loaded", "to none"])
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
def test_a_coefficient_that_becomes_zero_reads_nothing(change, inference, counted):
    """Whether one is zero is kept with the views, until the parameter changes."""
    with torch.inference_mode(inference), torch.no_grad():
        layer, (q, k, v) = KVShift(G), inputs(2, 1, torch.float32)
        arguments = {"state": state_of(2, torch.float32), "rotary": tables(2, 1, torch.float32)}
        if change == "to none":
            layer.alpha[0, 1] = 0
        layer(q, k, v, **arguments)
        zero = torch.tensor([1.0, float(change == "to none")])
        if change in ("in place", "to none"):
            layer.alpha[0] = zero
        elif change == "another parameter":
            layer.alpha = torch.nn.Parameter(zero * layer.alpha)
        elif change == "another dtype":
            layer.double().alpha[0] = zero.double()
        elif change == "a copy":
            layer = copy.deepcopy(layer)
            layer.alpha[0] = zero
        elif change == "loaded":
            layer.load_state_dict({"alpha": zero * layer.alpha, "beta": layer.beta.clone()})
        if change != "to none":
            arguments["state"].k[:, :, 0] = torch.inf
        results = layer(q, k, v, **arguments)
        assert len(counted) == 2
        for result, other in zip(results[:3], layer(q, k, v, **arguments, backend="eager"), strict=False):
            assert torch.equal(result, other)
            assert result.isfinite().all()


@torch.no_grad()
def test_a_device_is_asked_once_whether_one_is_zero(monkeypatch):
    asked = []
    monkeypatch.setattr(decode, "columns_of", lambda x, look: asked.append(look) or columns_of(x, look=look))
    layer, given = KVShift(G), inputs(2, 1, torch.float32)
    arguments = {"state": state_of(2, torch.float32), "rotary": tables(2, 1, torch.float32)}
    for _ in range(3):
        layer(*given, **arguments)
    assert asked == [True, True]
    layer.beta.mul_(2)
    layer(*given, **arguments)
    assert asked == [True] * 3


@pytest.mark.parametrize("constraint", ["gate", "clamp"])
@torch.no_grad()
def test_coefficients_under_a_constraint_go_in_one_call_too(constraint, counted):
    layer = KVShift(G, ShiftOptions(constraint=constraint))
    arguments = {"state": state_of(2, torch.float32), "rotary": tables(2, 1, torch.float32)}
    given = inputs(2, 1, torch.float32)
    results = layer(*given, **arguments)
    for result, other in zip(results[:3], layer(*given, **arguments, backend="eager"), strict=False):
        assert torch.equal(result, other)
    assert counted


@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "not rotated"])
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
def test_decoding_names_what_disagrees(change, error, message, rotated):
    q, k, v = inputs(2, 1, torch.float32)
    state = state_of(2, torch.float32)
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
        KVShift(G)(q, k, v, state=state, rotary=tables(2, 1, torch.float32) if rotated else None)


@pytest.mark.parametrize("targets", [(), ("k", "v")], ids=str)
@torch.no_grad()
def test_queries_of_other_sequences_are_rotated_as_in_many_calls(targets, counted):
    """Not a case of attention, but of memory: nothing is read that is not there."""
    layer, rotary = KVShift(G, ShiftOptions(targets=targets)), tables(1, 1, torch.float32)
    (_, k, v), (q, *_) = inputs(5, 1, torch.float32), inputs(2, 1, torch.float32)
    state = state_of(5, torch.float32) if targets else None
    results = layer(q, k, v, state=state, rotary=rotary)
    expected = layer(q, k, v, state=state, rotary=rotary, backend="eager")
    for result, other in zip(results[:3], expected[:3], strict=True):
        assert torch.equal(result, other)
    assert not counted


def test_the_gradient_goes_through_rotation():
    layer = KVShift(G).double()
    q, k, v = (x.requires_grad_() for x in inputs(2, 3, torch.float64))
    rotary = tables(2, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: layer(*x, rotary=rotary)[:3], (q, k, v))
