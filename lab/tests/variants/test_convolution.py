"""Convolutions of keys and values: their parts, and a slow loop of their formula for `test_mixing.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift import KVShift, param_groups
from kvshift_lab.variants.building import build_model, describe, shift_layers
from kvshift_lab.variants.by_name import find_variant, with_variant
from kvshift_lab.variants.convolution import ChannelConvolution
from kvshift_lab.variants.model_config import ModelConfig

from .layouts import HEADS, LAYOUTS, before, given, heads

FORMS = {
    "width 2": partial(ChannelConvolution, HEADS, window=2),
    "width 4": partial(ChannelConvolution, HEADS, window=4, residual=True),
    "width 5": partial(ChannelConvolution, HEADS, window=5),
}


def made(form: Any) -> ChannelConvolution:
    conv = form()
    with torch.no_grad():
        for number, parameter in enumerate(conv.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return conv


def by_loop(conv: ChannelConvolution, which: str, x: Tensor, rows: list[list[int | None]], _: Tensor) -> Tensor:
    """Compute in double precision, number by number. Padding stays 0."""
    weight = conv.alpha if which == "k" else conv.beta
    y, taps = torch.zeros_like(x, dtype=torch.float64), weight.double().view(*x.shape[2:], -1)
    for b, row in enumerate(rows):
        for t in range(len(row)):
            if row[t] is None:
                continue
            y[b, t] = x[b, t].double() if conv.residual else 0
            s: int | None = t
            for lag in range(taps.shape[-1]):
                if s is not None:
                    y[b, t] += taps[..., lag] * x[b, s].double()
                    s = before(row, s)
    return y


def test_without_boundaries_and_with_those_of_one_document_it_is_the_same() -> None:
    conv, (k, v) = made(FORMS["width 4"]), heads()
    got = conv.mix(k, v, None, mask=None, seq_idx=None)[0]
    assert torch.equal(got, conv.mix(k, v, None, **given(LAYOUTS["whole"]))[0])


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
    theirs = pytest.importorskip("transformers.models.inkling.modeling_inkling").InklingShortConvolution(60, 4, 0, 0)
    ours, (k, _) = made(partial(find_variant("inkling").make, HEADS)), heads()
    with torch.no_grad():
        theirs.conv1d.weight.copy_(ours.alpha.flip(1).unsqueeze(1))  # theirs have the current token last
    got = ours.mix(k, k, None, mask=None, seq_idx=None)[0]
    torch.testing.assert_close(got.flatten(2), theirs(k.flatten(2)), rtol=1e-6, atol=1e-6)
    mask = given(LAYOUTS["padding"])["mask"][1:2]  # padding on the left
    got = ours.mix(k[1:2], k[1:2], None, mask=mask, seq_idx=None)[0]
    there = theirs(k[1:2].flatten(2), conv_mask=mask)
    torch.testing.assert_close(got.flatten(2)[mask], there[mask], rtol=1e-6, atol=1e-6)


def test_their_weights_do_not_decay_stay_float32_and_are_not_recorded() -> None:
    options = with_variant(ModelConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=1), "canon")
    model = build_model(describe(options, vocab_size=31, length=9), seed=0, variant="canon").to(torch.bfloat16)
    (group,) = (group for group in param_groups(model, lr=1.0) if group["name"] == "shift")
    assert [weight.shape for weight in group["params"]] == [(24, 4)] * 2
    assert {weight.dtype for weight in group["params"]} == {torch.float32}
    assert group["weight_decay"] == 0
    assert shift_layers(model) == []


def test_how_they_start() -> None:
    large = HEADS._replace(kv_heads=50, size=100, initializer_range=0.02)
    weights = {name: find_variant(name).make(large).alpha for name in ("canon", "inkling", "conv-2")}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        "canon": (5000, 4),
        "inkling": (5000, 4),
        "conv-2": (5000, 2),
    }
    assert weights["canon"].abs().max() <= 0.5
    # The standard error of each of these is at most 0.6 % of the standard deviation.
    assert weights["canon"].std().item() == pytest.approx(12**-0.5, rel=0.03)
    assert weights["inkling"].std().item() == pytest.approx(0.02, rel=0.03)
    torch.testing.assert_close(weights["conv-2"].sum(1), torch.ones(5000))
    assert ((weights["conv-2"] >= 0) & (weights["conv-2"] <= 1)).all()
