"""Modules that replace the shift of attention against slow loops of their formulas: alone, in pieces, in a model.

For all variants that decode with a cache: cached = uncached = each sequence alone, however it is fed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvshift import ShiftState
from kvshift.models.extending import CACHE
from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.by_name import find_variant, with_variant
from kvshift_lab.variants.fox_shift import FoXShift
from kvshift_lab.variants.key_offset import KeyOffset
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.token_mixing import TokenMixing
from kvshift_lab.variants.uncached import decodes_with_cache
from tests.covering import covering
from tests.models.llama import checks
from tests.models.llama.tiny import PAD, left_padded, random_tokens, randomize, tiny_config

from . import test_convolution as convolution
from .layouts import HEADS, LAYOUTS, before, given, heads
from .test_attention_mixin import CACHE_CHECKS


def fox_shift() -> FoXShift:
    torch.manual_seed(0)
    return FoXShift(HEADS)


def fox_by_loop(shift: FoXShift, which: str, x: Tensor, rows: list[list[int | None]], hidden: Tensor) -> Tensor:
    """Compute in double precision, head by head."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for b, row in enumerate(rows):
        for t in range(len(row)):
            s = before(row, t)
            for head, w in enumerate((shift.key_gate if which == "k" else shift.value_gate).double()):
                a = 1 / (1 + math.exp(-(w @ hidden[b, t].double()).item()))
                y[b, t, head] = (1 - a) * x[b, t, head].double()
                if s is not None:
                    y[b, t, head] += a * x[b, s, head].double()
    return y


def offset_by_loop(mixer: KeyOffset, which: str, x: Tensor, rows: list[list[int | None]], _: Tensor) -> Tensor:
    y, quarter = x.double().clone(), x.shape[-1] // 4
    slow = range(4 * quarter) if mixer.whole else [*range(quarter, 2 * quarter), *range(3 * quarter, 4 * quarter)]
    for b, row in enumerate(rows):
        for t in range(len(row)):
            s = before(row, t)
            for d in slow if s is not None and which == "k" else []:
                y[b, t, :, d] = x[b, s, :, d]
    return y


# For each form, a function that makes the module, and its loop over (module, "k" or "v", heads, sequences, hidden).
FORMS: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
    **{name: (partial(convolution.made, form), convolution.by_loop) for name, form in convolution.FORMS.items()},
    "half": (partial(KeyOffset, HEADS), offset_by_loop),
    "whole": (partial(KeyOffset, HEADS, whole=True), offset_by_loop),
    "fox": (fox_shift, fox_by_loop),
}
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float64: 1e-12}  # bfloat16: half a unit of its 8 bits
every_form = pytest.mark.parametrize("form", FORMS)


def reading(mixer: TokenMixing, hidden: Tensor) -> AbstractContextManager[None]:
    return mixer.reading(hidden) if isinstance(mixer, FoXShift) else nullcontext()


def hidden_states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 7, HEADS.width, generator=torch.Generator().manual_seed(6)).to(dtype)


@covering(form=list(FORMS), rows=LAYOUTS, dtype=list(ROUNDED), cast=[False, True])
def test_by_the_loop(form: str, rows: list[list[int | None]], dtype: torch.dtype, cast: bool) -> None:
    """This also holds for a module that was cast, as a cast of its model does."""
    make, by_loop = FORMS[form]
    mixer, (k, v), hidden, real = make(), heads(dtype), hidden_states(dtype), given(rows)["mask"]
    mixer = mixer.to(dtype) if cast else mixer
    kept = k.clone()
    with reading(mixer, hidden):
        *mixed, _ = mixer.mix(k, v, None, **given(rows))
    for which, x, got in zip("kv", (k, v), mixed, strict=True):
        assert got.dtype == dtype
        expected = by_loop(mixer, which, x, rows, hidden)
        rtol = 0 if by_loop is offset_by_loop else ROUNDED[dtype]
        torch.testing.assert_close(got[real].double(), expected[real], rtol=rtol, atol=min(rtol, 1e-5))
    assert torch.equal(k, kept)


@every_form
def test_gradients(form: str) -> None:
    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = FORMS[form][0]().double()

        def forward(self, hidden: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            with reading(self.mixer, hidden):
                return self.mixer.mix(k, v, None, **given([row[:5] for row in LAYOUTS["padding"][:3]]))[:2]

    called = Called()
    names, weights = [name for name, _ in called.named_parameters()], list(called.parameters())
    inputs = [x[:3, :5].double().requires_grad_() for x in (hidden_states(), *heads())]

    def mixed(*tensors: Tensor) -> Any:
        return torch.func.functional_call(called, dict(zip(names, tensors[3:], strict=True)), tensors[:3])

    assert torch.autograd.gradcheck(mixed, (*inputs, *weights), fast_mode=True)


@every_form
@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS)
def test_in_any_two_pieces(form: str, rows: list[list[int | None]]) -> None:
    """The state holds the last real tokens; the second piece continues the last document."""
    mixer, (k, v), hidden, where = FORMS[form][0](), heads(), hidden_states(), given(rows)
    with reading(mixer, hidden):
        whole = mixer.mix(k, v, None, **where)
    real, numbers = where["mask"], where["seq_idx"].clone()
    for b, row in enumerate(rows):  # padding gets the number of the document before it
        for t in range(1, len(row)):
            if row[t] is None:
                numbers[b, t] = numbers[b, t - 1]
    for cut in range(8):
        state: ShiftState | None = None
        found: list[list[Tensor]] = [[], []]
        for piece in (slice(0, cut), slice(cut, 7)):
            if state is not None and 0 < cut < 7:  # the caller resets the state of another document
                keep = (numbers[:, cut] == numbers[:, cut - 1]).view(5, 1, 1, 1)
                state = ShiftState(state.k * keep, state.v * keep, state.max_rows)
            with reading(mixer, hidden[:, piece]):
                *mixed, state = mixer.mix(k[:, piece], v[:, piece], state, **{n: x[:, piece] for n, x in where.items()})
            for parts, x in zip(found, mixed, strict=True):
                parts.append(x)
        for parts, expected in zip(found, whole, strict=False):
            atol = 1e-6 if form == "fox" else 0  # its gates are a product of matrices
            torch.testing.assert_close(torch.cat(parts, dim=1)[real], expected[real], rtol=0, atol=atol)


def test_without_hidden_states_fox_has_no_gates() -> None:
    with pytest.raises(RuntimeError, match="call it within `reading`"):
        fox_shift().mix(*heads(), None, mask=None, seq_idx=None)


BY_LOOP = dict.fromkeys(("canon", "inkling", "conv-2"), convolution.by_loop) | {"fox-shift": fox_by_loop}
BY_LOOP |= dict.fromkeys(("key-offset", "key-offset-whole"), offset_by_loop)


@pytest.mark.parametrize("name", BY_LOOP)
def test_where_it_stands(name: str) -> None:
    """Keys are mixed before norm and rotary embedding (Canon: after the norm), values without either, by document."""
    options = with_variant(ModelConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=1, qk_norm=True), name)
    model = build_model(describe(options, vocab_size=31, length=9), seed=0, variant=name).double()
    layer: Any = model.model.layers[0]
    attention, seen = layer.self_attn, {}
    layer.input_layernorm.register_forward_hook(lambda module, inputs, output: seen.update(hidden=output))
    attention.shift.register_forward_hook(lambda module, inputs, outputs: seen.update(after=outputs[1:3]))
    with torch.no_grad():
        attention.k_norm.weight.copy_(torch.rand(12, dtype=torch.float64) + 0.5)
        for parameter in attention.shift.parameters():
            parameter.add_(0.3)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    model(torch.arange(7).unsqueeze(0), position_ids=positions)
    k, v = (project(seen["hidden"]).view(1, 7, 2, 12) for project in (attention.k_proj, attention.v_proj))
    rows, loop = [[0, 0, 0, 0, 1, 1, 1]], partial(BY_LOOP[name], attention.shift)
    k = attention.k_norm(k) if name == "canon" else k
    k = loop("k", k, rows, seen["hidden"])
    k = k if name == "canon" else attention.k_norm(k)
    cos, sin = (x.unsqueeze(2) for x in model.model.rotary_emb(k, positions))
    rotated = k * cos + torch.cat([-k[..., 6:], k[..., :6]], dim=-1) * sin
    torch.testing.assert_close(seen["after"][0], rotated, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(seen["after"][1], loop("v", v, rows, seen["hidden"]))
    assert getattr(attention.shift, "_gates", None) is None


# Variants that replace the shift or come before the layers; KV shift has its own tests in tests/models/llama.
CACHED = ("canon", "inkling", "conv-2", "key-offset", "key-offset-whole", "fox-shift", "smear")
every_cached = pytest.mark.parametrize("name", CACHED)


def cached_model(name: str) -> Any:
    model = find_variant(name).build(tiny_config(head_dim=12), seed=0)
    randomize(model, seed=1)
    model.generation_config.pad_token_id = PAD
    return model.double().eval()


@pytest.mark.parametrize(
    "check",
    [*CACHE_CHECKS, checks.check_splits, checks.check_chunked_prefill, checks.check_prompt_lookup],
    ids=lambda check: check.__name__,
)
@every_cached
def test_with_a_cache(check: Callable[[Any], None], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the model itself, without a cache, on one sequence alone."""
    model = cached_model(name)
    assert decodes_with_cache(model)

    def alone(_: Any, config: Any, row: list[int]) -> Tensor:
        return model(torch.tensor([row]), use_cache=False).logits[0]

    monkeypatch.setitem(checks.REFERENCES, model.config.model_type, alone)
    check(model)


@every_cached
def test_a_cache_that_is_reset_and_records_what_crop_needs(name: str) -> None:
    model, (ids, mask) = cached_model(name), left_padded([random_tokens(5), random_tokens(2, seed=1)])
    cache = DynamicCache(config=model.config)
    first = checks.logits_of(model, ids, attention_mask=mask, **{CACHE: cache})
    cache.reset()
    cache.activate_past_recording()
    again = checks.logits_of(model, ids, attention_mask=mask, **{CACHE: cache})
    torch.testing.assert_close(again[mask.bool()], first[mask.bool()], rtol=0, atol=1e-12)
