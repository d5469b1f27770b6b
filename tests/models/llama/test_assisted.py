"""Decoding with drafts, most of which are rejected: the tokens are those of plain greedy decoding."""

import pytest
import torch
from transformers import DynamicCache

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift.models.versions import CACHE

from .checks import assert_greedy, assert_next, new_tokens_of
from .tiny import random_tokens, tiny_model

VARIANTS = {
    "paper": {},
    "queries too, window 4": {"shift_targets": ["q", "k", "v"], "shift_window": 4},
    "sliding window": {"sliding_window": 6, "shift_window": 3},
    "no shift": {"shift_targets": []},
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.fixture
def crops(monkeypatch) -> list[int]:
    """How many tokens each `crop` of a cache took back."""
    taken = []
    original = DynamicCache.crop

    def crop(self, tokens_to_remove: int) -> None:
        taken.append(-tokens_to_remove)
        original(self, tokens_to_remove)

    monkeypatch.setattr(DynamicCache, "crop", crop)
    return taken


def repetitive_prompt() -> torch.Tensor:
    """Five tokens four times over, so that a look-up finds drafts, of which the model accepts few."""
    return random_tokens(1, 5).repeat(1, 4)


def assistant_of(model: KVShiftLlamaForCausalLM, **options) -> KVShiftLlamaForCausalLM:
    """Much like `model`, so that some of its drafts are right, and some are not."""
    assistant = tiny_model(torch.float64, **options)
    assistant.load_state_dict(model.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        noise = torch.randn(assistant.lm_head.weight.shape, generator=generator, dtype=torch.float64)
        assistant.lm_head.weight += 0.2 * noise
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


@every_variant
@pytest.mark.parametrize("passed", [False, True], ids=["own cache", "cache passed by hand"])
def test_prompt_lookup(options: dict, passed: bool, crops: list[int]):
    model, prompt = tiny_model(torch.float64, **options), repetitive_prompt()
    inputs = {CACHE: DynamicCache()} if passed and options.get("sliding_window") is None else {}
    generated = new_tokens_of(model, prompt, prompt_lookup_num_tokens=4, max_new_tokens=20, **inputs)
    assert_greedy(model, prompt, generated)
    assert sum(n > 0 for n in crops) >= 5, f"drafts were to be rejected, tokens taken back: {crops}"


@every_variant
def test_an_assistant_model(options: dict, crops: list[int]):
    model, prompt = tiny_model(torch.float64, **options), random_tokens(1, 9)
    generated = new_tokens_of(model, prompt, assistant_model=assistant_of(model, **options), max_new_tokens=20)
    assert_greedy(model, prompt, generated)
    assert sum(n > 0 for n in crops) >= 5, f"drafts were to be rejected, tokens taken back: {crops}"
    assert len(set(crops)) > 2, f"some drafts were to be accepted, tokens taken back: {crops}"


@pytest.mark.parametrize(("of_model", "of_assistant"), [({}, {"shift_targets": []}), ({"shift_targets": []}, {})])
def test_only_one_of_the_two_shifts(of_model: dict, of_assistant: dict, crops: list[int]):
    model, prompt = tiny_model(torch.float64, **of_model), random_tokens(1, 9)
    generated = new_tokens_of(model, prompt, assistant_model=assistant_of(model, **of_assistant), max_new_tokens=20)
    assert_greedy(model, prompt, generated)
    assert sum(n > 0 for n in crops) >= 5


def test_a_left_padded_prompt(crops: list[int]):
    model = tiny_model(torch.float64)
    prompt = repetitive_prompt()
    ids = torch.nn.functional.pad(prompt, (3, 0), value=1)
    mask = torch.nn.functional.pad(torch.ones_like(prompt), (3, 0))
    generated = new_tokens_of(model, ids, mask, prompt_lookup_num_tokens=4, max_new_tokens=20)
    assert_greedy(model, prompt, generated)
    assert sum(n > 0 for n in crops) >= 5


def test_prefill_in_chunks_before_the_drafts(crops: list[int]):
    model, prompt = tiny_model(torch.float64, shift_window=3), repetitive_prompt()
    options = {"prompt_lookup_num_tokens": 4, "prefill_chunk_size": 3, "max_new_tokens": 20}
    assert_greedy(model, prompt, new_tokens_of(model, prompt, **options))
    assert sum(n > 0 for n in crops) >= 5


def test_the_cache_is_right_after_the_last_draft():
    model, prompt = tiny_model(torch.float64), repetitive_prompt()
    result = model.generate(
        prompt, do_sample=False, max_new_tokens=11, prompt_lookup_num_tokens=4, return_dict_in_generate=True
    )
    cache, fed = result.past_key_values, result.past_key_values.get_seq_length()
    assert_next(model, result.sequences[:, :fed], cache, result.sequences[:, fed : fed + 1])


@every_variant
@pytest.mark.parametrize("early_exit", [False, True], ids=["assistant", "early exit"])
def test_the_pad_token_in_the_text(options: dict, early_exit: bool, crops: list[int]):
    """As in chat templates, in which it ends a turn. The mask is all ones, of which no assistant is told."""
    model, prompt = tiny_model(torch.float64, **options), random_tokens(1, 9)
    prompt[0, 4] = model.generation_config.pad_token_id
    drafts = {"assistant_early_exit": 1} if early_exit else {"assistant_model": assistant_of(model, **options)}
    generated = new_tokens_of(model, prompt, max_new_tokens=20, **drafts)
    assert_greedy(model, prompt, generated)
    assert sum(n > 0 for n in crops) >= 5, f"drafts were to be rejected, tokens taken back: {crops}"
    assert model.config.num_hidden_layers == 2


def test_an_assistant_sees_the_pad_token_as_the_token_that_it_is(monkeypatch):
    """Its drafts are those of the model itself, all of which are accepted."""
    model, prompt = tiny_model(torch.float64), random_tokens(1, 9)
    prompt[0, 4] = model.generation_config.pad_token_id
    assistant = tiny_model(torch.float64)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
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
    with pytest.raises((ValueError, NotImplementedError), match=r"[Ss]tatic cache"):  # transformers until 5.23, and we
        new_tokens_of(model, prompt, prompt_lookup_num_tokens=4, cache_implementation="static")
