"""Generation and caches: every sequence gets the results of the formulas for that sequence alone, without a cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvshift.models.cache import ShiftCacheLayer
from kvshift.models.versions import CACHE

from ..llama.checks import (
    ATOL,
    logits_of,
    reference_of,
)
from ..llama.tiny import left_padded, random_tokens, right_padded
from .tiny import CONFIG, config_with, load, write

OTHER = config_with(sliding_window_layers=[0, 1], num_swa_attention_heads=2, num_swa_key_value_heads=1)
STATIC = {"cache_implementation": "static", "disable_compile": True}
both = pytest.mark.parametrize("model", [CONFIG, OTHER], ids=["middle", "first two"], indirect=True)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("model"), config=getattr(request, "param", CONFIG)))


@both
def test_padding_behind_tokens_of_every_call(model):
    """Calls have different numbers of tokens, even none, padded on the right or left; the window skips padding."""
    cache, rows = DynamicCache(config=model.config), [torch.empty(0, dtype=torch.long)] * 3
    mask = torch.empty(3, 0, dtype=torch.long)
    for call, lengths in enumerate([(3, 8, 1), (6, 1, 2), (2, 0, 4), (1, 1, 1), (1, 5, 7)]):
        said = [random_tokens(length, seed=10 * call + length) for length in lengths]
        ids, new = (left_padded if call == 3 or call == 4 else right_padded)(said)
        before, mask = mask.sum(1), torch.cat([mask, new], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = logits_of(model, ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
        rows = [torch.cat([row, words]) for row, words in zip(rows, said, strict=True)]
        for number, row in enumerate(rows):
            expected = reference_of(model, row)[int(before[number]) :]
            torch.testing.assert_close(logits[number, new[number].bool()], expected, rtol=0, atol=ATOL)


@both
def test_documents_with_padding_behind_them_continue(model):
    """Packed rows of different lengths, padded on the right, are continued in their last documents."""
    packs = [[random_tokens(n, seed=n + 20 * row) for n in lengths] for row, lengths in enumerate([(4, 3), (2, 9)])]
    ids, mask = right_padded([torch.cat(pack) for pack in packs])
    numbers = [torch.repeat_interleave(torch.arange(2), torch.tensor([len(d) for d in pack])) for pack in packs]
    cache = DynamicCache(config=model.config)
    names, _ = right_padded(numbers, pad=1)
    positions = [torch.cat([torch.arange(len(document)) for document in pack]) for pack in packs]
    inputs = {"attention_mask": mask, "position_ids": right_padded(positions, pad=0)[0], "seq_idx": names}
    logits_of(model, ids, **{CACHE: cache}, **inputs)
    last = [pack[-1] for pack in packs]
    for step in range(4):
        token = random_tokens(2, 1, seed=90 + step)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        where = torch.tensor([[len(document)] for document in last])
        got = logits_of(model, token, attention_mask=mask, position_ids=where, **{CACHE: cache})
        last = [torch.cat([document, new]) for document, new in zip(last, token, strict=True)]
        for document, found in zip(last, got, strict=True):
            torch.testing.assert_close(found[-1], reference_of(model, document)[-1], rtol=0, atol=ATOL)


@both
def test_a_cache_with_padding_behind_tokens_is_cropped_and_reset(model):
    rows = [random_tokens(3), random_tokens(8, seed=1)]
    ids, mask = right_padded(rows)
    cache = DynamicCache(config=model.config)
    logits_of(model, ids, attention_mask=mask, **{CACHE: cache})
    cache.activate_past_recording()
    for count, cropped in ((4, 3), (1, 0), (3, 1)):
        drafts = random_tokens(2, count, seed=count)
        mask = torch.cat([mask, torch.ones_like(drafts)], dim=1)
        where = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, -count:]}
        got = logits_of(model, drafts, **{CACHE: cache}, **where)
        rows = [torch.cat([row, draft]) for row, draft in zip(rows, drafts, strict=True)]
        for row, found in zip(rows, got, strict=True):
            torch.testing.assert_close(found, reference_of(model, row)[-count:], rtol=0, atol=ATOL)
        cache.crop(-cropped)
        mask, rows = mask[:, : mask.shape[1] - cropped], [row[: len(row) - cropped] for row in rows]
    cache.reset()
    row = random_tokens(1, 9, seed=3)
    for piece, expected in zip(row.split(3, dim=1), reference_of(model, row[0]).split(3), strict=True):
        got = logits_of(model, piece, **{CACHE: cache})[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)


def test_the_state_of_the_released_shape():
    """The state is one raw key and value per layer: 122,880 bytes per sequence in bfloat16 for the 14B model."""
    from kvshift.models.baichuan_m1 import BaichuanM1Config, BaichuanM1Model

    config = BaichuanM1Config(
        **config_with(
            vocab_size=7,
            hidden_size=5120,
            intermediate_size=11,
            num_hidden_layers=40,
            num_attention_heads=20,
            num_key_value_heads=2,
            num_swa_attention_heads=40,
            num_swa_key_value_heads=8,
            sliding_window=8192,
            sliding_window_layers=list(range(1, 40, 2)),
            max_position_embeddings=32768,
        )
    )
    batch = 3
    with torch.device("meta"):
        decoder = BaichuanM1Model(config).to(torch.bfloat16)
        cache = decoder(torch.zeros(batch, 5, dtype=torch.long), use_cache=True).past_key_values
    states = [layer.shift_state for layer in cache.layers if isinstance(layer, ShiftCacheLayer)]
    assert len(states) == 40
    assert sum(rows.numel() * rows.itemsize for state in states for rows in (state.k, state.v)) == batch * 122_880
