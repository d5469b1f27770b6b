"""The data-dependent shift of FoX against a slow loop of its formula, alone and in a model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.lab.variants.building import build_model, describe
from kvshift.lab.variants.by_name import with_variant
from kvshift.lab.variants.fox_shift import FoXShift
from kvshift.lab.variants.mixing import Heads
from kvshift.lab.variants.model_config import ModelConfig

from .layouts import LAYOUTS, before, given

HEADS = Heads(kv_heads=3, size=10, width=17, initializer_range=0.7)
every_layout = pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS.keys())


def made() -> FoXShift:
    torch.manual_seed(0)
    return FoXShift(HEADS)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(5)
    k, v = (torch.randn(5, 7, HEADS.kv_heads, HEADS.size, generator=chance).to(dtype) for _ in "kv")
    return torch.randn(5, 7, HEADS.width, generator=chance).to(dtype), k, v


def by_loop(x: Tensor, gate: Tensor, hidden: Tensor, rows: list[list[int | None]]) -> Tensor:
    """In double precision, head by head."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for b, row in enumerate(rows):
        for t in range(len(row)):
            s = before(row, t)
            for head, w in enumerate(gate.double()):
                a = 1 / (1 + math.exp(-(w @ hidden[b, t].double()).item()))
                y[b, t, head] = (1 - a) * x[b, t, head].double()
                if s is not None:
                    y[b, t, head] += a * x[b, s, head].double()
    return y


@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_by_the_loop(rows: list[list[int | None]], dtype: torch.dtype) -> None:
    """bfloat16 is rounded once: half a unit in the last of its 8 bits."""
    shift, (hidden, k, v), real = made(), inputs(dtype), given(rows)["mask"]
    kept = k.clone()
    with shift.reading(hidden):
        *mixed, _ = shift.mix(k, v, None, **given(rows))
    for x, gate, got in zip((k, v), (shift.key_gate, shift.value_gate), mixed, strict=True):
        assert got.dtype == dtype
        expected = by_loop(x, gate, hidden, rows)
        rtol = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(got[real].double(), expected[real], rtol=rtol, atol=1e-5)
    assert torch.equal(k, kept)


def test_gradients() -> None:
    shift = made().double()
    hidden, k, v = (x[:3, :4].double().requires_grad_() for x in inputs())
    where = given([row[:4] for row in LAYOUTS["padding"][:3]])

    def mixed(hidden: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
        class Called(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.shift = shift

            def forward(self) -> tuple[Tensor, Tensor]:
                with self.shift.reading(hidden):
                    return self.shift.mix(k, v, None, **where)[:2]

        names = ("shift.key_gate", "shift.value_gate")
        return torch.func.functional_call(Called(), dict(zip(names, gates, strict=True)), ())

    given_all = (hidden, k, v, shift.key_gate, shift.value_gate)
    assert torch.autograd.gradcheck(mixed, given_all, fast_mode=True)


def test_it_says_who_has_to_call_it() -> None:
    shift, (hidden, k, v) = made(), inputs()
    with shift.reading(hidden):
        shift.mix(k, v, None, mask=None, seq_idx=None)
    with pytest.raises(RuntimeError, match="call it within `reading`"):
        shift.mix(k, v, None, mask=None, seq_idx=None)


def test_in_a_model_it_stands_before_the_norm_and_reads_what_the_projections_read() -> None:
    options = ModelConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=1, qk_norm=True)
    size = describe(with_variant(options, "fox-shift"), vocab_size=31, length=9)
    model = build_model(size, seed=0, variant="fox-shift").double()
    layer: Any = model.model.layers[0]
    seen: dict[str, Any] = {}
    layer.input_layernorm.register_forward_hook(lambda module, inputs, output: seen.update(hidden=output))
    attention = layer.self_attn
    attention.shift.register_forward_hook(lambda module, inputs, outputs: seen.update(after=outputs[1:3]))
    with torch.no_grad():
        for gate in (attention.shift.key_gate, attention.shift.value_gate):
            gate.mul_(50)
        attention.k_norm.weight.copy_(torch.rand(12, dtype=torch.float64) + 0.5)
    model(torch.arange(7).unsqueeze(0), output_attentions=True)
    rows, hidden = LAYOUTS["whole"][:1], seen["hidden"]
    k, v = (project(hidden).view(1, 7, 2, 12) for project in (attention.k_proj, attention.v_proj))
    k = attention.k_norm(by_loop(k, attention.shift.key_gate, hidden, rows))
    cos, sin = (x.unsqueeze(2) for x in model.model.rotary_emb(k, torch.arange(7).unsqueeze(0)))
    rotated = k * cos + torch.cat([-k[..., 6:], k[..., :6]], dim=-1) * sin
    torch.testing.assert_close(seen["after"][0], rotated, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(seen["after"][1], by_loop(v, attention.shift.value_gate, hidden, rows))
    assert attention.shift._gates is None
