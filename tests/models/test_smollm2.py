"""KV shift in a trained Llama: no change at first, and every way of decoding gives the uncached model's results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvshift.models.retrofit import add_kv_shift

from ..smollm2 import TEXTS, alone, encoded, pretrained, stock

pytestmark = pretrained

NEW = 16


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_the_same_bits(attention: str):
    given = encoded(TEXTS)
    real = given["attention_mask"].bool()
    model = stock(attention=attention)
    with torch.no_grad():
        before = model(**given, use_cache=False).logits[real]
        after = add_kv_shift(model)(**given, use_cache=False).logits[real]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_hundred_greedy_tokens_of_twenty_prompts():
    given = encoded(TEXTS)
    assert len(given["input_ids"]) == 20
    assert len(set(given["attention_mask"].sum(1).tolist())) >= 10, "prompts of many lengths"
    model, options = stock(), {"do_sample": False, "max_new_tokens": 100}
    before = model.generate(**given, **options)
    after = add_kv_shift(model).generate(**given, **options)
    assert before.shape[1] == given["input_ids"].shape[1] + 100
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def norm_in_float64(self: LlamaRMSNorm, hidden_states: Tensor) -> Tensor:
    """Compute in float64; transformers' own norm rounds to float32, which 30 layers amplify to 1e-5."""
    return F.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A float64 model with coefficients slightly off the identity, as after training: each (1, 0) + N(0, 0.1)."""
    model = add_kv_shift(stock(torch.float64))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".shift." in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", norm_in_float64)
        yield model


SOME = TEXTS[0], TEXTS[2], TEXTS[15], TEXTS[4]


def check(model: Any, prompt: Tensor, generated: Any, row: int = 0) -> None:
    """Check that `generate` gives the tokens and logits of the uncached model on this prompt and continuation alone."""
    length = generated.sequences.shape[1] - len(generated.logits)
    tokens = generated.sequences[row, length:]
    with torch.no_grad():
        logits = model(torch.cat([prompt, tokens[None]], dim=1), use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
    ends = (tokens == model.generation_config.eos_token_id).nonzero()
    until = int(ends[0]) + 1 if len(ends) else len(tokens)  # the rest is padding
    found = torch.stack([step[row] for step in generated.logits])  # transformers rounds these to float32
    torch.testing.assert_close(found[:until], logits[:until].float(), rtol=2.5e-7, atol=1e-7)
    assert tokens[:until].tolist() == logits[:until].argmax(-1).tolist()


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    wanted = {"do_sample": False, "max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, **wanted, **options)


def test_the_coefficients_of_these_tests_matter(model):
    with torch.no_grad():
        shifted, plain = (each(alone(SOME[0])).logits for each in (model, stock(torch.float64)))
    assert (shifted - plain).abs().max() > 1


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "prefill in chunks": {"prefill_chunk_size": 3},
    "prefill in chunks, static": {"prefill_chunk_size": 3, "cache_implementation": "static"},
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
def test_caches(model, cache: dict):
    given = encoded(SOME)
    if "prefill_chunk_size" in cache:  # transformers supports it only without padding
        for text in SOME[:3]:
            check(model, alone(text), generate(model, alone(text), **cache))
        return
    generated = generate(model, given["input_ids"], attention_mask=given["attention_mask"], **cache)
    for row, text in enumerate(SOME):
        check(model, alone(text), generated, row)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_beams(model, cache: dict):
    """A batch with a cache gives the beams of each prompt alone without a cache."""
    given = encoded(SOME[:3])
    options = {"do_sample": False, "num_beams": 3, "max_new_tokens": 8, "return_dict_in_generate": True}
    found = model.generate(**given, output_scores=True, **options, **cache)
    for row, text in enumerate(SOME[:3]):
        expected = model.generate(alone(text), use_cache=False, output_scores=True, **options)
        new = expected.sequences[0, alone(text).shape[1] :]
        torch.testing.assert_close(found.sequences[row, given["input_ids"].shape[1] :][: len(new)], new)
        torch.testing.assert_close(found.sequences_scores[row], expected.sequences_scores[0])


@pytest.mark.parametrize("drafts", ["assistant", "prompt lookup"])
def test_rejected_drafts(model, drafts: str, monkeypatch: pytest.MonkeyPatch):
    taken = []
    crop = DynamicCache.crop

    def counting(self, tokens_to_remove: int) -> None:
        taken.append(-tokens_to_remove)
        crop(self, tokens_to_remove)

    monkeypatch.setattr(DynamicCache, "crop", counting)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if drafts == "assistant":
        options = {"assistant_model": stock(torch.float64)}
        options["assistant_model"].generation_config.assistant_confidence_threshold = 0.0
    for text in SOME[1:3]:
        check(model, alone(text), generate(model, alone(text), **options))
    assert sum(count > 0 for count in taken) >= 2, f"drafts were to be rejected, tokens taken back: {taken}"


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_documents(model, use_cache: bool):
    documents = [alone(text) for text in SOME]
    starts = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    with torch.no_grad():
        packed = model(torch.cat(documents, dim=1), position_ids=starts, use_cache=use_cache).logits
        expected = torch.cat([model(document, use_cache=False).logits for document in documents], dim=1)
    torch.testing.assert_close(packed, expected, rtol=1e-9, atol=1e-9)
