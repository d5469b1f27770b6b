"""The edges that a shift can go wrong at: each call gives what the reference gives the sequence alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvshift import KVShift
from kvshift.models.versions import CACHE

from ..llama.checks import (
    assert_greedy,
    assert_next,
    check_beams,
    check_chunked_prefill,
    check_crop,
    check_decoding,
    check_documents,
    check_forward,
    check_left_padding,
    check_right_padding,
    check_selection,
    check_splits,
    check_static_cache_in_pieces,
    logits_of,
    new_tokens_of,
    reference_of,
)
from ..llama.tiny import left_padded, random_tokens
from .reference import gpt2_logits
from .tiny import shifted_gpt2

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "queries too, window 4": {"targets": ("q", "k", "v"), "window": 4},
    "values alone, gate": {"targets": ("v",), "constraint": "gate", "init": "uniform"},
}
every_variant = pytest.mark.parametrize("shift", VARIANTS.values(), ids=VARIANTS.keys())
static = {"cache_implementation": "static"}
CHECKS: list[Callable] = [
    check_forward,
    check_decoding,
    partial(check_decoding, **static),
    check_left_padding,
    partial(check_left_padding, **static),
    check_right_padding,
    check_beams,
    partial(check_beams, **static),
    check_chunked_prefill,
    check_splits,
    check_crop,
    check_selection,
    check_documents,
]


def name_of(check: Callable) -> str:
    return f"{check.func.__name__}(static)" if isinstance(check, partial) else check.__name__


@every_variant
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_against_the_reference(shift: dict, check: Callable):
    check(shifted_gpt2(torch.float64, **shift))


@pytest.mark.parametrize("check", [check_forward, check_decoding, check_left_padding, check_documents, check_splits])
def test_eager_attention(check: Callable):
    check(shifted_gpt2(torch.float64, attention="eager"))


def test_left_padding_with_positions():
    model = shifted_gpt2(torch.float64)
    rows = [random_tokens(length, seed=length) for length in (3, 11, 1, 8)]
    ids, mask = left_padded(rows)
    logits = logits_of(model, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for row, real, got in zip(rows, mask.bool(), logits, strict=True):
        torch.testing.assert_close(got[real], reference_of(model, row), rtol=0, atol=1e-12)


@every_variant
def test_a_bare_cache(shift: dict):
    model, row = shifted_gpt2(torch.float64, **shift), random_tokens(1, 9)
    cache = DynamicCache()
    logits_of(model, row, **{CACHE: cache})
    assert_next(model, row, cache, random_tokens(1, 1, seed=3))


@every_variant
def test_a_static_cache_in_pieces(shift: dict):
    check_static_cache_in_pieces(shifted_gpt2(torch.float64, **shift))


@every_variant
def test_drafts_that_are_rejected(shift: dict, monkeypatch: pytest.MonkeyPatch):
    taken, crop = [], DynamicCache.crop

    def counting(self: DynamicCache, tokens_to_remove: int) -> None:
        taken.append(-tokens_to_remove)
        crop(self, tokens_to_remove)

    monkeypatch.setattr(DynamicCache, "crop", counting)
    model, prompt = shifted_gpt2(torch.float64, **shift), random_tokens(1, 5).repeat(1, 4)
    generated = new_tokens_of(model, prompt, prompt_lookup_num_tokens=4, max_new_tokens=20)
    assert_greedy(model, prompt, generated)
    assert sum(n > 0 for n in taken) >= 4, f"drafts were to be rejected, tokens taken back: {taken}"


@pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_documents_named_by_other_arguments(name: str, use_cache: bool):
    """Positions count from the start of each where they are not given."""
    model = shifted_gpt2(torch.float64)
    documents = [random_tokens(length, seed=length) for length in (5, 1, 7)]
    named = {
        "seq_idx": torch.tensor([[0] * 5 + [1] + [2] * 7]),
        "cu_seq_lens_q": torch.tensor([0, 5, 6, 13], dtype=torch.int32),
    }
    logits = logits_of(model, torch.cat(documents).unsqueeze(0), use_cache=use_cache, **{name: named[name]})[0]
    for document, got in zip(documents, logits.split([5, 1, 7]), strict=True):
        torch.testing.assert_close(got, reference_of(model, document), rtol=0, atol=1e-12)


def test_decoding_continues_the_last_document_of_a_pack():
    model = shifted_gpt2(torch.float64)
    documents = [random_tokens(length, seed=length) for length in (5, 7)]
    cache = DynamicCache()
    positions = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0)
    logits_of(model, torch.cat(documents).unsqueeze(0), position_ids=positions, **{CACHE: cache})
    token = random_tokens(1, 1, seed=3)
    assert_next(model, documents[1].unsqueeze(0), cache, token, position_ids=torch.tensor([[7]]))
    row = torch.cat([documents[1], token[0]]).unsqueeze(0)  # and where no positions are given
    assert_next(model, row, cache, random_tokens(1, 1, seed=4))


@every_variant
def test_gradients(shift: dict):
    model, ids = shifted_gpt2(torch.float64, **shift), random_tokens(1, 11)
    upstream = torch.randn(11, 61, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (model(ids).logits[0] * upstream).sum().backward()
    weights = {name: tensor.clone().requires_grad_() for name, tensor in model.state_dict().items()}
    (gpt2_logits(weights, model.config, ids[0].tolist()) * upstream).sum().backward()
    for name, parameter in model.named_parameters():
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if ".shift." in name else {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(parameter.grad, weights[name].grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def test_no_output_depends_on_later_tokens():
    model, ids = shifted_gpt2(torch.float64), random_tokens(1, 9)
    embeds = model.transformer.wte(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits
    for t in range(9):
        (gradient,) = torch.autograd.grad(logits[0, t].sum(), embeds, retain_graph=True)
        seen = gradient[0].abs().sum(1) > 0
        assert seen.tolist() == [i <= t for i in range(9)]


Forward = Callable[..., tuple]


def no_mask(forward: Forward, *heads: Any, **where: Any) -> tuple:
    return forward(*heads, **{**where, "mask": None})


def no_documents(forward: Forward, *heads: Any, **where: Any) -> tuple:
    return forward(*heads, **{**where, "seq_idx": None})


def no_state(forward: Forward, *heads: Any, **where: Any) -> tuple:
    return forward(*heads, **{**where, "state": None})


def keys_and_values_exchanged(forward: Forward, shift: KVShift, q: Tensor, k: Tensor, v: Tensor, **where: Any) -> tuple:
    q, v, k, state = forward(shift, q, v, k, **where)
    return q, k, v, state


MUTANTS = {
    no_mask: [check_right_padding, check_chunked_prefill],
    no_documents: [check_documents],
    no_state: [check_decoding, check_chunked_prefill, check_splits, check_beams, check_crop],
    keys_and_values_exchanged: [check_forward, check_decoding],
}
CASES = [(mutant, check) for mutant, checks in MUTANTS.items() for check in checks]


@pytest.mark.parametrize(("mutant", "check"), CASES, ids=[f"{m.__name__}-{name_of(c)}" for m, c in CASES])
def test_the_suite_sees(mutant: Callable, check: Callable, monkeypatch: pytest.MonkeyPatch):
    """Negative controls."""
    model = shifted_gpt2(torch.float64)
    check(model)
    forward = KVShift.forward
    monkeypatch.setattr(KVShift, "forward", lambda *heads, **where: mutant(forward, *heads, **where))
    with pytest.raises(AssertionError):
        check(model)
