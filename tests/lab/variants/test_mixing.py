"""Modules that replace the shift of attention against slow loops of their formulas: alone, in pieces, in a model.

For all variants that decode with a cache: cached = uncached = each sequence alone, however it is fed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift import ShiftState
from kvshift.lab.variants.building import build_model, describe
from kvshift.lab.variants.by_name import with_variant
from kvshift.lab.variants.mixing import TokenMixing
from kvshift.lab.variants.model_config import ModelConfig
from kvshift.lab.variants.uncached import decodes_with_cache
from kvshift.models.versions import CACHE

from ...covering import covering
from . import test_convolution as convolution
from . import test_fox_shift as fox
from . import test_key_offset as key_offset
from .layouts import HEADS, LAYOUTS, given, heads
from .test_variant import TOKENS, documents, padded, shaken

# For each form, a function that makes the module, and its loop over (module, "k" or "v", heads, sequences, hidden).
FORMS: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
    **{name: (partial(convolution.made, form), convolution.by_loop) for name, form in convolution.FORMS.items()},
    **{name: (form, key_offset.by_loop) for name, form in key_offset.FORMS.items()},
    "fox": (fox.made, fox.by_loop),
}
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float64: 1e-12}  # bfloat16: half a unit of its 8 bits
every_form = pytest.mark.parametrize("form", FORMS)


def reading(mixer: TokenMixing, hidden: Tensor) -> AbstractContextManager[None]:
    return mixer.reading(hidden) if isinstance(mixer, fox.FoXShift) else nullcontext()


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
        rtol = 0 if by_loop is key_offset.by_loop else ROUNDED[dtype]
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
    names, weights = zip(*called.named_parameters(), strict=True) if form not in key_offset.FORMS else ((), ())
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


BY_LOOP = dict.fromkeys(("canon", "inkling", "conv-2"), convolution.by_loop) | {"fox-shift": fox.by_loop}
BY_LOOP |= dict.fromkeys(("key-offset", "key-offset-whole"), key_offset.by_loop)


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
both_families = pytest.mark.parametrize("family", ["llama", "gpt2"])


def decoder(name: str, family: str) -> Any:
    """Return the model without its head; the lab's GPT-2 has a cache only there."""
    model = shaken(name, family).double()
    return model.model if family == "llama" else model.transformer


def alone(body: Any, ids: Tensor) -> Tensor:
    return body(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def fed(body: Any, ids: Tensor, pieces: list[int], **first: Any) -> Tensor:
    """Return the hidden states of (B, T) ids fed in pieces of these lengths; `first` goes with the first piece."""
    cache, found = None, []
    for piece in ids.split(pieces, dim=1):
        output = body(input_ids=piece, **{CACHE: cache}, use_cache=True, **first)
        cache, first = output.past_key_values, {}
        found.append(output.last_hidden_state)
    return torch.cat(found, dim=1)


@both_families
@every_cached
def test_it_says_so(name: str, family: str) -> None:
    assert decodes_with_cache(shaken(name, family))


@both_families
@every_cached
def test_in_any_pieces(name: str, family: str) -> None:
    body, chance = decoder(name, family), torch.Generator().manual_seed(2)
    ids = torch.randint(TOKENS, (3, 7), generator=chance)
    expected = torch.stack([alone(body, row) for row in ids])
    for pieces in ([7], *([n, 7 - n] for n in range(1, 7)), [1] * 7, [2, 3, 2]):
        close(fed(body, ids, pieces), expected)


@covering(name=CACHED, side=["left", "right"], family=["llama", "gpt2"])
def test_padded_prompts_go_on_each_as_alone(name: str, side: str, family: str) -> None:
    body, texts = decoder(name, family), documents()
    ids, mask, positions = padded(texts, side)
    more = torch.randint(TOKENS, (len(texts), 3), generator=torch.Generator().manual_seed(4))
    output = body(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
    states = [output.last_hidden_state]
    for t in range(more.shape[1]):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        output = body(
            input_ids=more[:, t : t + 1],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            **{CACHE: output.past_key_values},
            use_cache=True,
        )
        states.append(output.last_hidden_state)
    for text, after, real, got in zip(texts, more, mask.bool(), torch.cat(states, dim=1), strict=True):
        close(got[real], alone(body, torch.cat([text, after])))


@covering(name=CACHED, chunk=[2, 3], family=["llama", "gpt2"])
def test_a_padded_prompt_in_chunks(name: str, chunk: int, family: str) -> None:
    """The first chunks of the shorter prompts contain only padding."""
    body, texts = decoder(name, family), documents()
    ids, mask, positions = padded(texts, "left")
    cache, states = None, []
    for start in range(0, ids.shape[1], chunk):
        end = start + chunk
        output = body(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            **{CACHE: cache},
            use_cache=True,
        )
        cache = output.past_key_values
        states.append(output.last_hidden_state)
    for text, real, got in zip(texts, mask.bool(), torch.cat(states, dim=1), strict=True):
        close(got[real], alone(body, text))


@both_families
@every_cached
def test_the_last_of_packed_documents_continues(name: str, family: str) -> None:
    body, texts = decoder(name, family), documents()
    more = torch.randint(TOKENS, (4,), generator=torch.Generator().manual_seed(4))
    ids = torch.cat([*texts, more]).unsqueeze(0)
    packed = ids.shape[1] - len(more)
    numbers = torch.cat([torch.full((len(text),), n) for n, text in enumerate(texts)]).unsqueeze(0)
    got = fed(body, ids, [packed, 1, 3], seq_idx=numbers)
    close(got[0, -len(more) - len(texts[-1]) :], alone(body, torch.cat([texts[-1], more])))


@both_families
@every_cached
def test_a_cache_that_is_reordered_repeated_reset_and_cropped(name: str, family: str) -> None:
    body, chance = decoder(name, family), torch.Generator().manual_seed(2)
    ids, more = torch.randint(TOKENS, (3, 5), generator=chance), torch.randint(TOKENS, (3, 2), generator=chance)
    order = torch.tensor([2, 0, 0])

    def begun(rows: Tensor) -> Any:
        return body(input_ids=rows, use_cache=True).past_key_values

    def go_on(cache: Any, rows: Tensor) -> Tensor:
        return body(input_ids=rows, **{CACHE: cache}, use_cache=True).last_hidden_state

    expected = go_on(begun(ids[order]), more)
    for change in ("reorder_cache", "batch_select_indices"):
        cache = begun(ids)
        getattr(cache, change)(order)
        close(go_on(cache, more), expected)
    cache = begun(ids)
    cache.batch_repeat_interleave(2)
    close(
        go_on(cache, more.repeat_interleave(2, 0)),
        go_on(begun(ids.repeat_interleave(2, 0)), more.repeat_interleave(2, 0)),
    )
    cache.reset()
    close(go_on(cache, ids), go_on(None, ids))
    cache = begun(ids[:, :1])
    for layer in cache.layers:
        layer.activate_past_recording()
    go_on(cache, ids[:, 1:])
    cache.crop(-2)
    close(go_on(cache, more), go_on(begun(ids[:, :3]), more))


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 2},
    ],
    ids=lambda how: next(iter(how)),
)
@every_cached
def test_generate(name: str, how: dict[str, Any]) -> None:
    model = shaken(name, "llama").double()
    ids = torch.tensor([[3, 1, 4, 1, 5, 3, 1]])
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    beams = {name: value for name, value in how.items() if name == "num_beams"}
    expected = model.generate(ids, use_cache=False, **asked, **beams)
    assert torch.equal(model.generate(ids, **asked, **how), expected)


@every_cached
def test_generate_of_padded_prompts(name: str) -> None:
    model, texts = shaken(name, "llama").double(), documents()
    ids, mask, _ = padded(texts, "left", 0)
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **asked)[:, ids.shape[1] :]
    for text, got in zip(texts, together, strict=True):
        assert torch.equal(got, model.generate(text.unsqueeze(0), use_cache=False, **asked)[0, len(text) :])
