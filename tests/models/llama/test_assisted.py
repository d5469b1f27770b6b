"""Decoding with drafts, most of which are rejected: the tokens are those of plain greedy decoding."""

import pytest
import torch
from transformers import DynamicCache

from kvshift.models.versions import CACHE

from .checks import (
    VARIANTS,
    assert_greedy,
    assert_greedy_with_drafts,
    assert_next,
    assistant_of,
    check_prompt_lookup,
    crops,
    every_variant,
    new_tokens_of,
)
from .tiny import random_tokens, tiny_model


def repetitive_prompt() -> torch.Tensor:
    """Return five tokens, four times: a lookup finds drafts, of which the model accepts few."""
    return random_tokens(1, 5).repeat(1, 4)


@pytest.mark.parametrize("options", [VARIANTS["paper"], VARIANTS["queries too, window 4"]], ids=str)
def test_prompt_lookup_in_a_cache_passed_by_hand(options: dict):
    check_prompt_lookup(tiny_model(torch.float64, **options), **{CACHE: DynamicCache()})


@pytest.mark.parametrize(("of_model", "of_assistant"), [({}, {"shift_targets": []}), ({"shift_targets": []}, {})])
def test_only_one_of_the_two_shifts(of_model: dict, of_assistant: dict):
    model, assistant = (tiny_model(torch.float64, **options) for options in (of_model, of_assistant))
    assistant.load_state_dict(model.state_dict(), strict=False)
    assert_greedy_with_drafts(model, random_tokens(1, 9), assistant_model=assistant_of(model, assistant))


def test_a_left_padded_prompt():
    model = tiny_model(torch.float64)
    prompt = repetitive_prompt()
    ids = torch.nn.functional.pad(prompt, (3, 0), value=1)
    mask = torch.nn.functional.pad(torch.ones_like(prompt), (3, 0))
    with crops() as taken:
        generated = new_tokens_of(model, ids, mask, prompt_lookup_num_tokens=4, max_new_tokens=20)
    assert_greedy(model, prompt, generated)
    assert sum(n > 0 for n in taken) >= 5


def test_prefill_in_chunks_before_the_drafts():
    check_prompt_lookup(tiny_model(torch.float64, shift_window=3), prefill_chunk_size=3)


def test_the_cache_is_right_after_the_last_draft():
    model, prompt = tiny_model(torch.float64), repetitive_prompt()
    result = model.generate(
        prompt, do_sample=False, max_new_tokens=11, prompt_lookup_num_tokens=4, return_dict_in_generate=True
    )
    cache, fed = result.past_key_values, result.past_key_values.get_seq_length()
    assert_next(model, result.sequences[:, :fed], cache, result.sequences[:, fed : fed + 1])


@every_variant
@pytest.mark.parametrize("early_exit", [False, True], ids=["assistant", "early exit"])
def test_the_pad_token_in_the_text(options: dict, early_exit: bool):
    """Chat templates end a turn with the pad token. The mask, all ones, is not passed on to an assistant."""
    model, prompt = tiny_model(torch.float64, **options), random_tokens(1, 9)
    prompt[0, 4] = model.generation_config.pad_token_id
    drafts = {"assistant_early_exit": 1} if early_exit else {"assistant_model": assistant_of(model)}
    assert_greedy_with_drafts(model, prompt, **drafts)
    assert model.config.num_hidden_layers == 2


def test_an_assistant_sees_the_pad_token_as_the_token_that_it_is(monkeypatch):
    """Its drafts are those of the model itself, and all of them are accepted."""
    model, prompt = tiny_model(torch.float64), random_tokens(1, 9)
    prompt[0, 4] = model.generation_config.pad_token_id
    assistant = assistant_of(model, noise=0.0)
    lengths = []
    forward = type(model).forward

    def counting(self, input_ids, **inputs):
        if self is model:
            lengths.append(input_ids.shape[1])
        return forward(self, input_ids, **inputs)

    monkeypatch.setattr(type(model), "forward", counting)
    new_tokens_of(model, prompt, assistant_model=assistant, max_new_tokens=16)
    assert lengths == [13, 5, 5, 1]


def test_layers_after_a_failed_draft_by_early_exit(monkeypatch):
    model = tiny_model()

    def forward(*args, **kwargs):
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(type(model.model), "forward", forward)
    with pytest.raises(RuntimeError, match="out of memory"):
        new_tokens_of(model, random_tokens(1, 5), assistant_early_exit=1)
    assert model.config.num_hidden_layers == 2


def test_drafts_are_refused_for_static_caches():
    model, prompt = tiny_model(), repetitive_prompt()
    with pytest.raises((ValueError, NotImplementedError), match=r"[Ss]tatic cache"):  # theirs, ours
        new_tokens_of(model, prompt, prompt_lookup_num_tokens=4, cache_implementation="static")
