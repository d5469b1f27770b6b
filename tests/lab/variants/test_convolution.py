"""Convolutions of keys and values against a slow loop of their formula, alone, in pieces and in models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift import KVShift, ShiftState, param_groups
from kvshift.lab.variants.building import build_model, describe, shift_layers
from kvshift.lab.variants.by_name import find_variant, with_variant
from kvshift.lab.variants.convolution import ChannelConvolution
from kvshift.lab.variants.mixing import Heads
from kvshift.lab.variants.model_config import ModelConfig

from .layouts import LAYOUTS, before, given

HEADS = Heads(kv_heads=3, size=10, width=17, initializer_range=0.02)
FORMS = {
    "width 2": partial(ChannelConvolution, HEADS, window=2),
    "width 4": partial(ChannelConvolution, HEADS, window=4, residual=True),
    "width 5": partial(ChannelConvolution, HEADS, window=5),
}
every_layout = pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS.keys())
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def made(form: Any) -> ChannelConvolution:
    conv = form()
    with torch.no_grad():
        for number, parameter in enumerate(conv.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return conv


def heads(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(5)
    k, v = (torch.randn(5, 7, HEADS.kv_heads, HEADS.size, generator=chance).to(dtype) for _ in "kv")
    return k, v


def by_loop(x: Tensor, weight: Tensor, rows: list[list[int | None]], *, residual: bool) -> Tensor:
    """In double precision, number by number; padding is left as 0."""
    y, taps = torch.zeros_like(x, dtype=torch.float64), weight.double().view(*x.shape[2:], -1)
    for b, row in enumerate(rows):
        for t in range(len(row)):
            if row[t] is None:
                continue
            y[b, t] = x[b, t].double() if residual else 0
            s: int | None = t
            for lag in range(taps.shape[-1]):
                if s is not None:
                    y[b, t] += taps[..., lag] * x[b, s].double()
                    s = before(row, s)
    return y


@every_layout
@every_form
def test_by_the_loop(form: Any, rows: list[list[int | None]]) -> None:
    conv, (k, v), real = made(form), heads(), given(rows)["mask"]
    kept = k.clone()
    k_hat, v_hat, _ = conv.mix(k, v, None, **given(rows))
    for x, weight, got in ((k, conv.alpha, k_hat), (v, conv.beta, v_hat)):
        expected = by_loop(x, weight, rows, residual=conv.residual)
        torch.testing.assert_close(got[real].double(), expected[real], rtol=1e-5, atol=1e-5)
    assert torch.equal(k, kept)


@every_form
def test_without_boundaries_and_with_those_of_one_document_it_is_the_same(form: Any) -> None:
    conv, (k, v) = made(form), heads()
    torch.testing.assert_close(
        conv.mix(k, v, None, mask=None, seq_idx=None)[0],
        conv.mix(k, v, None, **given(LAYOUTS["whole"]))[0],
        rtol=0,
        atol=0,
    )


@every_layout
@every_form
def test_bfloat16_is_rounded_once(form: Any, rows: list[list[int | None]]) -> None:
    """Half a unit in the last of its 8 bits; weights stay float32 when the module is cast."""
    conv, (k, v), real = made(form).to(torch.bfloat16), heads(torch.bfloat16), given(rows)["mask"]
    assert conv.alpha.dtype == torch.float32
    got = conv.mix(k, v, None, **given(rows))[1]
    assert got.dtype == torch.bfloat16
    expected = by_loop(v, conv.beta, rows, residual=conv.residual)
    torch.testing.assert_close(got[real].double(), expected[real], rtol=2**-8, atol=1e-5)


@every_form
def test_gradients(form: Any) -> None:
    conv = made(form).double()
    k, v = (x[:3, :5].double().requires_grad_() for x in heads())
    where = given([row[:5] for row in LAYOUTS["padding"][:3]])

    def mixed(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.zeros(3, 5, 1, HEADS.size, dtype=torch.float64)
        return torch.func.functional_call(conv, {"alpha": alpha, "beta": beta}, (q, k, v), where)[1:3]

    assert torch.autograd.gradcheck(mixed, (k, v, conv.alpha, conv.beta), fast_mode=True)


@every_layout
@every_form
def test_in_any_two_pieces(form: Any, rows: list[list[int | None]]) -> None:
    """The state holds the last W - 1 real tokens; the second piece continues the document that is last in it."""
    conv, (k, v), where = made(form), heads(), given(rows)
    whole = conv.mix(k, v, None, **where)
    real, numbers = where["mask"], where["seq_idx"].clone()
    for b, row in enumerate(rows):  # where padding stands, the number of the document before it
        for t in range(1, len(row)):
            if row[t] is None:
                numbers[b, t] = numbers[b, t - 1]
    for cut in range(8):
        state: ShiftState | None = None
        found: list[list[Tensor]] = [[], []]
        for piece in (slice(0, cut), slice(cut, 7)):
            begins = [
                b for b in range(5) if cut and piece.start == cut and cut < 7 and numbers[b, cut] != numbers[b, cut - 1]
            ]
            if begins:  # of these sequences the state is that of another document, which the caller resets
                assert state is not None
                keep = torch.ones(5, 1, 1, 1)
                keep[begins] = 0
                state = ShiftState(state.k * keep, state.v * keep, state.max_rows)
            inside = {name: x[:, piece] for name, x in where.items()}
            *mixed, state = conv.mix(k[:, piece], v[:, piece], state, **inside)
            for parts, x in zip(found, mixed, strict=True):
                parts.append(x)
        for parts, expected in zip(found, whole, strict=False):
            torch.testing.assert_close(torch.cat(parts, dim=1)[real], expected[real], rtol=0, atol=0)


def test_of_a_head_whose_channels_are_alike_it_is_kv_shift() -> None:
    shift, conv, (k, v) = KVShift(HEADS.kv_heads), made(FORMS["width 2"]), heads()
    with torch.no_grad():
        for name in ("alpha", "beta"):
            getattr(conv, name).copy_(getattr(shift, name).repeat_interleave(HEADS.size, dim=0))
    q = torch.randn(5, 7, 6, HEADS.size)
    for where in (given(LAYOUTS["padding"]), given(LAYOUTS["documents"]), {}):
        real = where.get("mask", torch.ones(5, 7, dtype=torch.bool))
        for got, expected in zip(conv(q, k, v, **where)[:3], shift(q, k, v, **where)[:3], strict=True):
            torch.testing.assert_close(got[real], expected[real], rtol=1e-6, atol=1e-6)


def test_inkling_is_what_transformers_computes() -> None:
    theirs = pytest.importorskip("transformers.models.inkling.modeling_inkling").InklingShortConvolution(30, 4, 0, 0)
    ours, (k, _) = made(partial(find_variant("inkling").make, HEADS)), heads()
    with torch.no_grad():
        theirs.conv1d.weight.copy_(ours.alpha.flip(1).unsqueeze(1))  # theirs has the current token last
    got = ours.mix(k, k, None, mask=None, seq_idx=None)[0]
    torch.testing.assert_close(got.flatten(2), theirs(k.flatten(2)), rtol=1e-6, atol=1e-6)
    mask = given(LAYOUTS["padding"])["mask"][1:2]  # on the left
    got = ours.mix(k[1:2], k[1:2], None, mask=mask, seq_idx=None)[0]
    there = theirs(k[1:2].flatten(2), conv_mask=mask)
    torch.testing.assert_close(got.flatten(2)[mask], there[mask], rtol=1e-6, atol=1e-6)


def test_their_weights_do_not_decay_and_are_not_recorded() -> None:
    options = with_variant(ModelConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=1), "canon")
    model = build_model(describe(options, vocab_size=31, length=9), seed=0, variant="canon")
    (group,) = (group for group in param_groups(model, lr=1.0) if group["name"] == "shift")
    assert [weight.shape for weight in group["params"]] == [(24, 4)] * 2
    assert group["weight_decay"] == 0
    assert shift_layers(model) == []


def test_how_they_start() -> None:
    large = Heads(kv_heads=50, size=100, width=17, initializer_range=0.02)
    weights = {name: find_variant(name).make(large).alpha for name in ("canon", "inkling", "conv-2")}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        "canon": (5000, 4),
        "inkling": (5000, 4),
        "conv-2": (5000, 2),
    }
    assert weights["canon"].abs().max() <= 0.5
    # the standard error of each of these is at most 0.6 % of the spread
    assert weights["canon"].std().item() == pytest.approx(12**-0.5, rel=0.03)
    assert weights["inkling"].std().item() == pytest.approx(0.02, rel=0.03)
    torch.testing.assert_close(weights["conv-2"].sum(1), torch.ones(5000))
    assert ((weights["conv-2"] >= 0) & (weights["conv-2"] <= 1)).all()


@pytest.mark.parametrize(("name", "normed"), [("canon", True), ("inkling", False), ("conv-2", False)])
def test_where_it_stands(name: str, normed: bool) -> None:
    """Canon between norm and rotary embedding of the keys, the others before both; values have neither."""
    options = with_variant(ModelConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=1, qk_norm=True), name)
    model = build_model(describe(options, vocab_size=31, length=9), seed=0, variant=name).double()
    attention: Any = model.model.layers[0].self_attn
    seen: dict[str, Any] = {}
    attention.shift.register_forward_hook(
        lambda module, inputs, outputs: seen.update(before=inputs[1:], after=outputs[1:])
    )
    with torch.no_grad():
        attention.k_norm.weight.copy_(torch.rand(12, dtype=torch.float64) + 0.5)
    model(torch.arange(7).unsqueeze(0))
    k, v = seen["before"][:2]
    rows, shift = LAYOUTS["whole"][:1], attention.shift
    k = attention.k_norm(k) if normed else k
    k = by_loop(k, shift.alpha, rows, residual=shift.residual)
    k = k if normed else attention.k_norm(k)
    cos, sin = (x.unsqueeze(2) for x in model.model.rotary_emb(k, torch.arange(7).unsqueeze(0)))
    rotated = k * cos + torch.cat([-k[..., 6:], k[..., :6]], dim=-1) * sin
    torch.testing.assert_close(seen["after"][0], rotated, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(seen["after"][1], by_loop(v, shift.beta, rows, residual=shift.residual))
