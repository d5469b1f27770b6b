"""`generate`: cached = not cached = the reference for each sequence alone, for greedy, beam and sampled decoding."""

import pytest
import torch
from transformers import DynamicCache, StaticCache, set_seed

from kvshift.models.versions import CACHE

from .llama.checks import (
    assert_greedy,
    assert_next,
    logits_of,
    new_tokens_of,
)
from .llama.reference import reference_greedy
from .llama.tiny import left_padded, random_tokens, right_padded, tiny_model
from .retrofit.tiny_families import shifted


@pytest.fixture(scope="module")
def model():
    return tiny_model(torch.float64, attention="sdpa")


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["plain", "beams"])
def test_sampling_draws_the_same_with_and_without_cache(model, options: dict):
    ids, mask = left_padded([random_tokens(length, seed=length) for length in (3, 9)])
    options = {"num_return_sequences": 3, "do_sample": True, "temperature": 1.5, "max_new_tokens": 9, **options}
    drawn = []
    for extra in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 2}):
        set_seed(5)
        drawn.append(new_tokens_of(model, ids, mask, **options, **extra))
    assert len({tuple(row) for row in drawn[0].tolist()}) > 2  # the draws differ, so equality is not trivial
    for other in drawn[1:]:
        torch.testing.assert_close(other, drawn[0], rtol=0, atol=0)


@pytest.mark.parametrize("pad", [0, 1, 17, 60])
def test_the_id_of_the_padding_does_not_matter(model, pad: int):
    rows = [random_tokens(length, seed=length) for length in (3, 9, 1)]
    ids, mask = left_padded(rows, pad)
    assert_greedy(model, rows, new_tokens_of(model, ids, mask, pad_token_id=pad))


def test_sequences_that_end_early_are_padded_and_leave_the_others_alone(model):
    """After its end-of-sequence token, a sequence continues with padding that the mask counts as real."""
    rows = [random_tokens(length, seed=length) for length in (3, 9, 5)]
    free = [reference_greedy(model.state_dict(), model.config, row.tolist(), 9) for row in rows]
    eos = free[0][2]
    ids, mask = left_padded(rows)
    generated = new_tokens_of(model, ids, mask, max_new_tokens=9, eos_token_id=eos, pad_token_id=0).tolist()
    for got, expected in zip(generated, free, strict=True):
        end = expected.index(eos) + 1 if eos in expected else len(expected)
        assert got[:end] == expected[:end]
        assert set(got[end:]) <= {0}
    assert generated[0][3] == 0


def test_padding_behind_tokens_is_not_cropped_from_a_window():
    model = tiny_model(sliding_window=9, shift_targets=[])
    ids, mask = right_padded([random_tokens(3), random_tokens(5)])
    cache = DynamicCache(config=model.config)
    logits_of(model, ids, attention_mask=mask, **{CACHE: cache})
    with pytest.raises(RuntimeError, match="cannot crop 2 tokens: the cache holds padding after a token"):
        cache.crop(-2)


def test_a_neighbour_padded_on_the_right_does_no_harm(model):
    """The right-padded sequence itself gets wrong tokens, and transformers warns.

    For any model, it reads the first new token off the padding and numbers the next ones from there.
    `check_right_padding` shows what to pass instead.
    """
    rows = [random_tokens(length, seed=length) for length in (3, 9)]
    generated = new_tokens_of(model, *right_padded(rows))
    assert_greedy(model, rows[1:], generated[1:])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}], ids=["paper", "sliding"])
def test_a_batch_continues_with_padding_between_its_messages(options: dict):
    """Each turn is padded on the left, so there is padding in the middle of the sequences."""
    model = tiny_model(torch.float64, **options)
    cache, rows = DynamicCache(config=model.config), [torch.empty(0, dtype=torch.long)] * 2
    ids = mask = torch.empty(2, 0, dtype=torch.long)
    for turn, lengths in enumerate([(3, 6), (5, 2), (1, 4)]):
        said = [random_tokens(length, seed=10 * turn + length) for length in lengths]
        turn_ids, turn_mask = left_padded(said)
        ids, mask = torch.cat([ids, turn_ids], dim=1), torch.cat([mask, turn_mask], dim=1)
        rows = [torch.cat([row, words]) for row, words in zip(rows, said, strict=True)]
        answer = new_tokens_of(model, ids, mask, **{CACHE: cache}, max_new_tokens=4)
        assert_greedy(model, rows, answer)
        ids, mask = torch.cat([ids, answer], dim=1), torch.cat([mask, torch.ones_like(answer)], dim=1)
        rows = [torch.cat([row, words]) for row, words in zip(rows, answer, strict=True)]


def test_generate_returns_a_cache_to_continue_from(model):
    prompt = random_tokens(1, 6)
    result = model.generate(prompt, do_sample=False, max_new_tokens=4, return_dict_in_generate=True)
    row = result.sequences[:, :-1]  # the last token was not fed
    assert_next(model, row, result.past_key_values, result.sequences[:, -1:])


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 3,
    "long_factor": [4.0, 3.0, 2.0],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 16,
}
HOW = {
    "greedy": {},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_phi3_passes_the_length_at_which_it_drops_its_cache(how: dict):
    """Its rotary frequencies change there, so that all keys are computed again, in an empty cache of the same kind."""
    model = shifted("Phi-3", rope_parameters=LONG_ROPE, original_max_position_embeddings=16, sliding_window=None)
    prompt = random_tokens(1, 12)
    expected = new_tokens_of(model, prompt, max_new_tokens=14, use_cache=False, num_beams=how.get("num_beams", 1))
    result = model.generate(
        prompt, do_sample=False, max_new_tokens=14, min_new_tokens=14, return_dict_in_generate=True, **how
    )
    torch.testing.assert_close(result.sequences[:, 12:], expected, rtol=0, atol=0)
    if "static" in str(how):
        assert isinstance(result.past_key_values, StaticCache)


def test_embeddings_in_place_of_ids(model):
    ids = random_tokens(2, 5)
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(ids), do_sample=False, max_new_tokens=6)
    torch.testing.assert_close(embedded, new_tokens_of(model, ids, max_new_tokens=6), rtol=0, atol=0)
