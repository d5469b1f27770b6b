"""The cache as an object: every operation on its keys and values also applies to the state of the shift."""

import copy

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

from kvshift.models.llama import ensure_shift_cache
from kvshift.models.versions import CACHE

from .llama.checks import ATOL, VARIANTS, assert_next, every_variant, logits_of, reference_of
from .llama.tiny import left_padded, random_tokens, right_padded, tiny_config, tiny_model
from .registry import MODELS, RETROFITTED


def filled(model, row: torch.Tensor, *, recording: bool = False) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    ensure_shift_cache(cache, model.config)
    if recording:
        cache.activate_past_recording()
    logits_of(model, row, **{CACHE: cache})
    return cache


@pytest.mark.slow
@hypothesis.given(
    options=st.sampled_from(list(VARIANTS.values())),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 5), min_size=9, max_size=9),
    recorded=st.lists(st.integers(0, 3), min_size=9, max_size=9),
)
@hypothesis.settings(max_examples=60)
def test_any_pieces_of_any_sequences_with_drafts_in_between(
    options: dict, lengths: list[int], sizes: list[int], recorded: list[int]
):
    """After every piece, some tokens are drafted and cropped; each sequence still has the reference's logits."""
    model = tiny_model(torch.float64, **options)
    rows = [random_tokens(length, seed=length) for length in lengths]
    ids, mask = left_padded(rows)
    cache = DynamicCache(config=model.config)
    ensure_shift_cache(cache, model.config)
    cache.activate_past_recording()
    pieces, end = [], 0
    for size, drafts in zip(sizes, recorded, strict=True):
        start, end = end, min(end + size, max(lengths))
        if start == end:
            break
        pieces.append(logits_of(model, ids[:, start:end], attention_mask=mask[:, :end], **{CACHE: cache}))
        cache.crop(0)
        if drafts:
            draft_mask = torch.cat([mask[:, :end], torch.ones(len(rows), drafts, dtype=mask.dtype)], dim=1)
            draft = random_tokens(len(rows), drafts, seed=end)
            logits_of(model, draft, attention_mask=draft_mask, **{CACHE: cache})
            cache.crop(-drafts)
    for row, real, got in zip(rows, mask[:, :end].bool(), torch.cat(pieces, dim=1), strict=True):
        torch.testing.assert_close(got[real], reference_of(model, row)[: int(real.sum())], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("by_hand", [DynamicCache, lambda: None], ids=["DynamicCache()", "use_cache=True"])
def test_a_cache_without_configuration_is_made_fit(name: str, by_hand):
    model, row = MODELS[name](torch.float64), random_tokens(1, 8)
    with torch.no_grad():
        cache = model(row, **{CACHE: by_hand()}, use_cache=True).past_key_values
    assert_next(model, row, cache, random_tokens(1, 1, seed=3))


@pytest.mark.parametrize("options", [VARIANTS[name] for name in VARIANTS if name != "no shift"], ids=str)
def test_reset_begins_anew(options: dict):
    """(Without shift the layers are transformers' own, which did not reset their length before version 5.17.)"""
    model = tiny_model(torch.float64, **options)
    cache = filled(model, random_tokens(2, 8))
    cache.reset()
    assert cache.get_seq_length() == 0
    row = random_tokens(1, 4, seed=1)  # another batch size, too
    logits_of(model, row, **{CACHE: cache})
    assert_next(model, row, cache, random_tokens(1, 1, seed=3))


@every_variant
def test_a_prefix_serves_several_continuations(options: dict):
    model, prefix = tiny_model(torch.float64, **options), random_tokens(1, 8)
    cache = filled(model, prefix)
    for seed in range(3):
        tail = random_tokens(1, 2, seed=seed)
        branch = copy.deepcopy(cache)
        logits_of(model, tail, **{CACHE: branch})
        assert_next(model, torch.cat([prefix, tail], dim=1), branch, random_tokens(1, 1, seed=9))
    assert_next(model, prefix, cache, random_tokens(1, 1, seed=9))


@every_variant
@pytest.mark.parametrize("indices", [[1], [True, False, True]], ids=str)
def test_sequences_can_be_dropped(options: dict, indices: list):
    model, rows = tiny_model(torch.float64, **options), random_tokens(3, 8)
    cache = filled(model, rows)
    cache.batch_select_indices(torch.tensor(indices))
    kept = rows[torch.tensor(indices)]
    assert_next(model, kept, cache, random_tokens(len(kept), 1, seed=3))


def test_an_empty_cache_can_be_repeated_selected_and_reordered():
    model, row = tiny_model(torch.float64), random_tokens(1, 4)
    cache = DynamicCache(config=model.config)
    ensure_shift_cache(cache, model.config)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reorder_cache(torch.tensor([0]))
    cache.crop(0)
    logits_of(model, row, **{CACHE: cache})
    assert_next(model, row, cache, random_tokens(1, 1, seed=3))


@every_variant
def test_crop_to_empty_begins_anew(options: dict):
    model = tiny_model(torch.float64, **options)
    cache = filled(model, random_tokens(1, 4, seed=5), recording=True)
    cache.crop(-4)
    assert cache.get_seq_length() == 0
    row = random_tokens(1, 6)
    logits_of(model, row, **{CACHE: cache})
    assert_next(model, row, cache, random_tokens(1, 1, seed=3))


def test_crop_zero_is_always_possible_and_ends_the_record():
    model, row = tiny_model(torch.float64), random_tokens(1, 8)
    for recording in (False, True):
        cache = filled(model, row, recording=recording)
        cache.crop(0)
        assert all(layer.shift_state.rows == 1 for layer in cache.layers)
        assert_next(model, row, cache, random_tokens(1, 1, seed=3))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"shift_window": 4}], ids=str)
def test_crop_deeper_than_the_record_raises_and_never_zeroes(options: dict):
    model, row = tiny_model(torch.float64, **options), random_tokens(1, 8)
    cache = filled(model, row[:, :6])
    cache.activate_past_recording()
    logits_of(model, row[:, 6:], **{CACHE: cache})
    with pytest.raises(RuntimeError, match=r"cannot crop 3 tokens"):
        cache.crop(-3)
    cache.crop(-1)  # this ends the record
    with pytest.raises(RuntimeError, match=r"cannot crop 1 tokens"):
        cache.crop(-1)
    assert_next(model, row[:, :7], cache, random_tokens(1, 1, seed=3))


@pytest.mark.parametrize(
    ("recording", "tokens", "error", "message"),
    [
        (False, -1, RuntimeError, "cannot crop 1 tokens.*activate_past_recording"),
        (True, -5, ValueError, "cannot crop 5 tokens from a cache of 4"),
        (True, 3, ValueError, "tokens_to_remove must be 0 or negative, got 3"),
    ],
)
def test_a_crop_that_cannot_be_changes_nothing(recording: bool, tokens: int, error: type[Exception], message: str):
    model, row = tiny_model(torch.float64), random_tokens(1, 4)
    cache = filled(model, row, recording=recording)
    with pytest.raises(error, match=message):
        cache.crop(tokens)
    assert_next(model, row, cache, random_tokens(1, 1, seed=3))


def test_static_caches_refuse_what_they_cannot_do():
    model = tiny_model()
    cache = StaticCache(config=model.config, max_cache_len=16)
    logits_of(model, random_tokens(2, 5), **{CACHE: cache})
    for operation in (
        lambda: cache.crop(-1),
        cache.activate_past_recording,
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
    ):
        with pytest.raises(NotImplementedError, match=r"a static cache .*use a DynamicCache"):
            operation()


WITH_WINDOW = {
    name: build
    for name, build in {**MODELS, **RETROFITTED}.items()
    if any("sliding" in layer_type for layer_type in build().config.layer_types)
}


def feed(model, cache, calls: list[tuple[int, ...]], forward=None) -> None:
    """Feed a number of tokens to each row in each call, padded on the right, and check their logits."""
    rows, mask = [torch.empty(0, dtype=torch.long) for _ in calls[0]], torch.empty(len(calls[0]), 0, dtype=torch.long)
    for call, lengths in enumerate(calls):
        pieces = [random_tokens(length, seed=10 * call + length) for length in lengths]
        ids, new = right_padded(pieces)
        before, mask = mask.sum(1), torch.cat([mask, new], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        run = forward if forward is not None and call > 1 else model
        logits = logits_of(run, ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
        rows = [torch.cat(both) for both in zip(rows, pieces, strict=True)]
        for i, row in enumerate(rows):
            expected = reference_of(model, row)[int(before[i]) :]
            torch.testing.assert_close(logits[i, new[i].bool()], expected, rtol=0, atol=ATOL)


def test_there_are_models_with_windows():
    assert {"Llama, sliding window", "Baichuan-M1", "Mistral, retrofitted", "Gemma 3, retrofitted"} <= set(WITH_WINDOW)


@pytest.mark.parametrize("name", WITH_WINDOW)
def test_padding_after_tokens_in_a_static_cache_no_longer_than_the_window(name: str):
    model = WITH_WINDOW[name](torch.float64)
    window = model.config.sliding_window  # 5 or 7
    for length in (window - 1, window):
        cache = StaticCache(config=model.config, max_cache_len=length)
        calls = [(2, 1), (0, 1), *([(1, 1)] * (length - 3))]
        feed(model, cache, calls)
        cache.reset()
        feed(model, cache, [(1, 1)] * length)  # without padding


COMPILED = pytest.param("Mistral, retrofitted", True, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in WITH_WINDOW), COMPILED])
def test_padding_after_tokens_in_a_longer_static_cache_is_refused(name: str, compiled: bool):
    """Before the window counts padding: at once or, if all layers have a window, when the tokens exceed it."""
    model = WITH_WINDOW[name](torch.float64)
    calls = [(2, 1), (0, 1), *([(1, 1)] * model.config.sliding_window)]
    forward = torch.compile(model, backend="eager") if compiled else None
    with pytest.raises(ValueError, match="attention_mask must be padded on the left with a static cache that is"):
        feed(model, StaticCache(config=model.config, max_cache_len=32), calls, forward)


def test_an_adopted_cache_is_left_alone():
    config = tiny_config()
    cache = DynamicCache(config=config)
    ensure_shift_cache(cache, config)
    layers = list(cache.layers)
    ensure_shift_cache(cache, config)
    assert all(new is old for new, old in zip(cache.layers, layers, strict=True))
