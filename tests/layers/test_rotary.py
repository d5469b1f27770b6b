"""Rotary embedding together with the shift: the bits of separate steps, in one call or in many."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift import KVShift, ShiftOptions, ShiftState
from kvshift.ops import attention_inputs, decode
from kvshift.ops.decode import make_columns
from kvshift.ops.rope import half_tables, rotate_half
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


def a_token(batch: int = 2, dtype: torch.dtype = torch.float32, angles: int = 2) -> dict[str, Any]:
    """Return the arguments of a call with one token of every sequence, including the state."""
    given = dict(zip("qkv", inputs(batch, 1, dtype), strict=True))
    return given | {"state": state_of(batch, dtype), "rotary": tables(angles, 1, dtype)}


def checked(layer: KVShift, **given: Any) -> tuple[Any, ...]:
    """Call the layer, check that its results have the bits of eager operations, and return them."""
    results, expected = layer(**given), layer(**given, backend="eager")
    for result, other in zip(results[:3], expected[:3], strict=True):
        assert torch.equal(result, other)
        assert result.isfinite().all()
    if layer.targets:
        assert torch.equal(results[3].k, expected[3].k)
        assert torch.equal(results[3].v, expected[3].v)
    return results


@pytest.fixture
def with_progress(monkeypatch) -> list:
    """The calls that took the path for the next token of generation."""
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
def test_the_next_token_has_the_bits_of_one_step_after_the_other(dtype, targets, rows, with_progress):
    batch, angles = rows
    layer = KVShift(G, ShiftOptions(targets=targets), num_heads=H).to(torch.promote_types(dtype, torch.float32))
    checked(layer, **a_token(batch, dtype, angles))
    assert len(with_progress) == 1  # "eager" does not take this path


def same_rows(q: Tensor, k: Tensor, v: Tensor, state: ShiftState, rotary: Any) -> dict[str, Any]:
    """Return other strides, infinities where coefficients are zero, and wider tables: still the next token."""
    q, rows = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, state.k))
    rows[0, 0, 1] = v[1, 0, 0] = torch.inf
    return {"q": q, "v": v, "state": ShiftState(rows, state.v, 1), "rotary": tables(2, 1, torch.float64)}


# Changes of the arguments, and options of the layer; only the first three take the path for the next token.
TAKEN: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = {
    "next token": (same_rows, {}),
    "gate": (lambda **_: {}, {"constraint": "gate"}),
    "clamp": (lambda **_: {}, {"constraint": "clamp"}),
    "state of two rows": (lambda **_: {"state": state_of(2, torch.float32, rows=2)}, {}),
    "window 3": (lambda **_: {"state": state_of(2, torch.float32, rows=2)}, {"window": 3}),
    "queries too": (
        lambda state, **_: {"state": replace(state, q=torch.randn(2, 1, H, D))},
        {"targets": ("q", "k", "v")},
    ),
    "no state": (lambda **_: {"state": None}, {}),
    "gradients": (lambda **_: {}, {}),
    "fewer queries": (lambda q, **_: {"q": q[:1], "rotary": tables(1, 1, torch.float32)}, {}),  # q is only rotated
    "fewer queries alone": (lambda q, **_: {"q": q[:1], "rotary": tables(1, 1, torch.float32)}, {"targets": ()}),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_taken_as_the_next_token(case, with_progress):
    change, options = TAKEN[case]
    given = a_token()
    given |= change(**given)
    layer = KVShift(G, ShiftOptions(**options), num_heads=H)
    if case == "next token":
        layer.alpha.data[1, 1] = layer.beta.data[0, 0] = 0
    with torch.set_grad_enabled(case == "gradients"):
        checked(layer, **given)
    assert bool(with_progress) is (case in list(TAKEN)[:3])


def by_data(layer: KVShift, alpha: Tensor) -> None:
    layer.alpha.data.copy_(alpha)


def in_new_memory(layer: KVShift, alpha: Tensor) -> None:
    beta = layer.beta.clone()
    layer.to("meta").to_empty(device="cpu").load_state_dict({"alpha": alpha, "beta": beta})


CHANGES: dict[str, Callable[[KVShift, Tensor], Any]] = {
    "in place": lambda layer, alpha: layer.alpha.copy_(alpha),
    "by .data": by_data,
    "another parameter": lambda layer, alpha: setattr(layer, "alpha", torch.nn.Parameter(alpha)),
    "another dtype": lambda layer, alpha: layer.double().alpha.copy_(alpha),
    "loaded": lambda layer, alpha: layer.load_state_dict({"alpha": alpha, "beta": layer.beta.clone()}),
    "assigned": lambda layer, alpha: layer.load_state_dict({"alpha": alpha, "beta": layer.beta.clone()}, assign=True),
    "new memory": in_new_memory,
}


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        (change, numbers)
        for change in CHANGES
        for numbers in ("others", "a zero", "no zero any more")
        if (change, numbers) != ("by .data", "a zero")  # still multiplied, until the next change
    ],
)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("copied", [False, True], ids=["", "a copy"])
def test_the_next_token_takes_the_coefficients_as_they_are_now(change, numbers, inference, copied, with_progress):
    """Between tokens, the layer caches views of the coefficients and whether one is zero: a zero lag is not read."""
    with torch.inference_mode(inference), torch.no_grad():
        layer, given = KVShift(G), a_token()
        if numbers == "no zero any more":
            layer.alpha[0, 1] = 0
        first = layer(**given)
        alpha = layer.alpha * 3
        alpha[0, 1] = 0 if numbers == "a zero" else 0.5
        if numbers == "a zero":
            given["state"].k[:, :, 0] = torch.inf
        if copied:
            layer = copy.deepcopy(layer)
        CHANGES[change](layer, alpha)
        second = checked(layer, **given)
        assert len(with_progress) == 2
        assert not torch.equal(second[1], first[1])


@torch.no_grad()
def test_a_device_is_asked_once_whether_one_is_zero(monkeypatch):
    asked = []

    def recorded(x, find_zeros):
        asked.append(find_zeros)
        return make_columns(x, find_zeros=find_zeros)

    monkeypatch.setattr(decode, "make_columns", recorded)
    layer, given = KVShift(G), a_token()
    for _ in range(3):
        layer(**given)
    assert asked == [True, True]
    layer.beta.mul_(2)
    layer(**given)
    assert asked == [True] * 3


# Changes of k, v and the rows of state for both, with the error messages.
DISAGREEMENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "k of fewer rows": (lambda k, v, rows_k, rows_v: (k[:1], v, rows_k[:1], rows_v), "v must match k"),
    "v of fewer rows": (lambda k, v, rows_k, rows_v: (k, v[:1], rows_k, rows_v[:1]), "v must match k"),
    "v of fewer heads": (lambda k, v, rows_k, rows_v: (k, v[:, :, :2], rows_k, rows_v[:, :, :2]), "v must match k"),
    "all of one head": (lambda *all_four: [x[:, :, :1] for x in all_four], "alpha must be .* with 1 heads"),
    "all of more heads": (lambda *all_four: [x.repeat(1, 1, 2, 1) for x in all_four], "alpha must be .* with 6 heads"),
    "fewer rows of k": (lambda k, v, rows_k, rows_v: (k, v, rows_k[:1], rows_v), r"k must be \(2, rows, 3, 10\)"),
    "more rows than max_rows": (
        lambda k, v, *rows: (k, v, *(x.repeat(1, 2, 1, 1) for x in rows)),
        "state must hold equally many keys and values, at most max_rows",
    ),
    "k without heads": (lambda k, v, rows_k, rows_v: (k[:, :, 0], v, rows_k[:, :, 0], rows_v), "k must have 4 dim"),
    "v in float64": (lambda k, v, rows_k, rows_v: (k, v.double(), rows_k, rows_v.double()), "v must match k"),
    "v in bfloat16": (lambda k, v, *rows: (k, v.bfloat16(), *rows), "v must match k"),
    "k as a list": (lambda k, *others: (k.tolist(), *others), "k must be a tensor"),
    "v as a list": (lambda k, v, *rows: (k, v.tolist(), *rows), "v must be a tensor"),
}


@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "not rotated"])
@pytest.mark.parametrize(("change", "message"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
@torch.no_grad()
def test_decoding_names_what_disagrees(change, message, rotated):
    q, k, v, state, rotary = a_token().values()
    k, v, *rows = change(k, v, state.k, state.v)
    with pytest.raises(TypeError if "a tensor" in message else ValueError, match=message):
        KVShift(G)(q, k, v, state=ShiftState(*rows, 1), rotary=rotary if rotated else None)
