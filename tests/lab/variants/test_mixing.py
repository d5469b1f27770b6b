"""Variants that decode with a cache: cached = uncached = each sequence alone, however it is fed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.lab.variants.uncached import decodes_with_cache
from kvshift.models.versions import CACHE

from ...covering import covering
from .test_variant import TOKENS, documents, shaken

# What stands in the place of the shift or before the layers; KV shift has its own tests in tests/models/llama.
CACHED = ("canon", "inkling", "conv-2", "key-offset", "key-offset-whole", "fox-shift", "smear")
every_cached = pytest.mark.parametrize("name", CACHED)
both_families = pytest.mark.parametrize("family", ["llama", "gpt2"])


def decoder(name: str, family: str) -> Any:
    """Without the head; the lab's GPT-2 has a cache only there."""
    model = shaken(name, family).double()
    return model.model if family == "llama" else model.transformer


def alone(body: Any, ids: Tensor) -> Tensor:
    return body(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def fed(body: Any, ids: Tensor, pieces: list[int], **first: Any) -> Tensor:
    """Hidden states of (B, T) ids that are fed in pieces of such lengths; `first` is for the first piece."""
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
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(texts, batch_first=True, padding_value=7, padding_side=side)
    mask = pad([torch.ones_like(text) for text in texts], batch_first=True, padding_side=side)
    more = torch.randint(TOKENS, (len(texts), 3), generator=torch.Generator().manual_seed(4))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
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
    """The first chunks of the shorter prompts are padding alone."""
    body, texts = decoder(name, family), documents()
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(texts, batch_first=True, padding_value=7, padding_side="left")
    mask = pad([torch.ones_like(text) for text in texts], batch_first=True, padding_side="left")
    positions, cache, states = (mask.cumsum(1) - 1).clamp(min=0), None, []
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
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(texts, batch_first=True, padding_value=0, padding_side="left")
    mask = pad([torch.ones_like(text) for text in texts], batch_first=True, padding_side="left")
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **asked)[:, ids.shape[1] :]
    for text, got in zip(texts, together, strict=True):
        assert torch.equal(got, model.generate(text.unsqueeze(0), use_cache=False, **asked)[0, len(text) :])
