"""Properties of a model as functions: the tests run them on sound models, `test_mutants.py` on broken ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from kvshift.models.versions import CACHE

from ..baichuan_m1.reference import logits_of_state_dict
from ..retrofit.reference import gpt2_logits
from ..retrofit.tiny_families import truth_of
from .reference import reference_logits
from .tiny import left_padded, random_tokens, right_padded

REFERENCES = {
    "kvshift_llama": reference_logits,
    "kvshift_gpt2": gpt2_logits,
    "baichuan_m1": logits_of_state_dict,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "queries too, window 4": {"shift_targets": ["q", "k", "v"], "shift_window": 4},
    "sliding window": {"sliding_window": 5, "shift_window": 3},
    "no shift": {"shift_targets": []},
}
"""Options of `tiny_model`."""
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)

# Llama's norms and rotary angles are in float32, even in a float64 model; the logits here are of size 1 to 8.
ATOL = 3e-5


def logits_of(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


def reference_of(model: PreTrainedModel, row: Tensor) -> Tensor:
    """Return the logits (T, V) of one sequence by the formulas or, if a family has none here, by `truth_of`."""
    formulas = REFERENCES.get(model.config.model_type)
    if formulas is None:
        return logits_of(truth_about(model), row.unsqueeze(0), use_cache=False)[0]
    with torch.no_grad():
        return formulas(model.state_dict(), model.config, row.tolist())


_TRUTHS: WeakKeyDictionary[PreTrainedModel, tuple[list[int], PreTrainedModel]] = WeakKeyDictionary()


def truth_about(model: PreTrainedModel) -> PreTrainedModel:
    """Return `truth_of(model)`, computed once for the same weights."""
    versions = [parameter._version for parameter in model.parameters()]
    if model not in _TRUTHS or _TRUTHS[model][0] != versions:
        _TRUTHS[model] = versions, truth_of(model)
    return _TRUTHS[model][1]


def new_tokens_of(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Return the tokens that greedy `generate` adds to the prompts, (B, new tokens)."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"do_sample": False, "max_new_tokens": 7, **options}
    return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]


def assert_greedy(model: PreTrainedModel, rows: Sequence[Tensor], generated: Tensor) -> None:
    """Check that each sequence got the tokens that the reference gives it alone: greedily, the likeliest ones."""
    for row, got in zip(rows, generated, strict=True):
        likeliest = reference_of(model, torch.cat([row, got]))[len(row) - 1 : -1].argmax(1)
        assert torch.equal(got, likeliest), (
            f"prompt of {len(row)} tokens: generated {got.tolist()}, the reference after each {likeliest.tolist()}"
        )


def assert_next(model: PreTrainedModel, rows: Sequence[Tensor], cache: Cache, next_ids: Tensor, **inputs) -> None:
    """Check that `cache` is in the state after these sequences: one more token gives the reference's logits."""
    got = logits_of(model, next_ids, **{CACHE: cache}, **inputs)[:, -1]
    for row, token, logits in zip(rows, next_ids, got, strict=True):
        torch.testing.assert_close(logits, reference_of(model, torch.cat([row, token]))[-1], rtol=0, atol=ATOL)


def check_forward(model: PreTrainedModel, length: int = 23) -> None:
    ids = random_tokens(2, length)
    logits = logits_of(model, ids)
    for row, got in zip(ids, logits, strict=True):
        torch.testing.assert_close(got, reference_of(model, row), rtol=0, atol=ATOL)


def check_decoding(model: PreTrainedModel, **options: Any) -> None:
    for length in (1, 2, 5, 13):
        ids = random_tokens(1, length, seed=length)
        assert_greedy(model, ids, new_tokens_of(model, ids, **options))


def check_left_padding(model: PreTrainedModel, **options: Any) -> None:
    """Each sequence of a left-padded batch gets the tokens that it gets alone."""
    rows = [random_tokens(length, seed=length) for length in (3, 11, 1, 8)]
    ids, mask = left_padded(rows)
    assert_greedy(model, rows, new_tokens_of(model, ids, mask, **options))


def check_padding_without_positions(model: PreTrainedModel) -> None:
    """Only the mask marks the padding; rotary angles are relative, so positions may begin within the padding."""
    rows = [random_tokens(length, seed=length) for length in (3, 11, 1, 8)]
    expected = [reference_of(model, row) for row in rows]
    for ids, mask in (left_padded(rows), right_padded(rows)):
        logits = logits_of(model, ids, attention_mask=mask)
        for alone, real, got in zip(expected, mask.bool(), logits, strict=True):
            torch.testing.assert_close(got[real], alone, rtol=0, atol=ATOL)


def check_right_padding(model: PreTrainedModel, cache: Cache | None = None) -> None:
    """Padding after a sequence does not affect the tokens that continue it."""
    rows = [random_tokens(length, seed=length) for length in (3, 11, 1, 8)]
    ids, mask = right_padded(rows)
    cache = DynamicCache(config=model.config) if cache is None else cache
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = logits_of(model, ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
    for row, got in zip(rows, logits, strict=True):
        torch.testing.assert_close(got[: len(row)], reference_of(model, row), rtol=0, atol=ATOL)
    lengths = mask.sum(1, keepdim=True)
    for step in range(3):
        token = random_tokens(len(rows), 1, seed=50 + step)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        assert_next(model, rows, cache, token, attention_mask=mask, position_ids=lengths + step)
        rows = [torch.cat([row, new]) for row, new in zip(rows, token, strict=True)]


def check_beams(model: PreTrainedModel, **options: Any) -> None:
    """Beam search finds the same beams with a cache as without, for all returned beams of a left-padded batch."""
    ids, mask = left_padded([random_tokens(length, seed=length) for length in (3, 9)])
    beams = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 8}
    expected = new_tokens_of(model, ids, mask, use_cache=False, **beams)
    torch.testing.assert_close(new_tokens_of(model, ids, mask, **beams, **options), expected, rtol=0, atol=0)


def check_chunked_prefill(model: PreTrainedModel, **options: Any) -> None:
    """Prefill in chunks of 1, 4 and 8 tokens, some of only padding, and some that begin within a sequence."""
    for size in (1, 4, 8):
        check_left_padding(model, prefill_chunk_size=size, **options)


def check_splits(model: PreTrainedModel, atol: float = 1e-12) -> None:
    """A sequence in two pieces, cut anywhere, gives the logits of the whole; so does a sequence token by token."""
    ids = random_tokens(1, 9)
    whole = logits_of(model, ids)
    for sizes in [(cut, 9 - cut) for cut in range(1, 9)] + [(1,) * 9, (1, 3, 1, 2, 2)]:
        cache = DynamicCache(config=model.config)
        pieces = [logits_of(model, piece, **{CACHE: cache}) for piece in ids.split(sizes, dim=1)]
        torch.testing.assert_close(
            torch.cat(pieces, dim=1), whole, rtol=0, atol=atol, msg=lambda m, s=sizes: f"{s}: {m}"
        )


def check_static_cache_in_pieces(model: PreTrainedModel) -> None:
    """A sequence in pieces through a static cache gives the logits that it has without a cache."""
    row = random_tokens(1, 12)
    whole = logits_of(model, row)
    for sizes in [(12,), (1,) * 12, (3, 1, 8), (7, 4, 1)]:
        cache = StaticCache(config=model.config, max_cache_len=32)
        pieces = [logits_of(model, piece, **{CACHE: cache}) for piece in row.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-12)


def check_crop(model: PreTrainedModel) -> None:
    """Cropped tokens leave no trace, for every number of them within the recorded ones."""
    kept, drafted, token = random_tokens(1, 6), random_tokens(1, 5, seed=1), random_tokens(1, 1, seed=2)
    for n in range(drafted.shape[1] + 1):
        cache = DynamicCache(config=model.config)
        logits_of(model, kept, **{CACHE: cache})
        cache.activate_past_recording()
        logits_of(model, drafted, **{CACHE: cache})
        cache.crop(-n)
        row = torch.cat([kept, drafted[:, : drafted.shape[1] - n]], dim=1)
        assert cache.get_seq_length() == row.shape[1]
        assert_next(model, row, cache, token)


def check_selection(model: PreTrainedModel) -> None:
    """Sequences of a cache can be repeated, selected and reordered, as custom decoding loops do."""
    rows = random_tokens(3, 8)
    moves = {
        "batch_repeat_interleave": (2, torch.tensor([0, 0, 1, 1, 2, 2])),
        "batch_select_indices": (torch.tensor([2, 0, 0, 1]), torch.tensor([2, 0, 0, 1])),
        "reorder_cache": (torch.tensor([2, 0, 0]), torch.tensor([2, 0, 0])),
    }
    for move, (argument, order) in moves.items():
        cache = DynamicCache(config=model.config)
        logits_of(model, rows, **{CACHE: cache})
        getattr(cache, move)(argument)
        assert_next(model, rows[order], cache, random_tokens(len(order), 1, seed=3))


def check_documents(model: PreTrainedModel) -> None:
    """Documents packed into one sequence give the logits of separate sequences, whichever argument marks them."""
    lengths = (5, 1, 7, 2)
    documents = [random_tokens(length, seed=length) for length in lengths]
    expected = [reference_of(model, document) for document in documents]
    for name, value in names_of(lengths).items():
        for use_cache in (False, True):
            packed = logits_of(model, torch.cat(documents).unsqueeze(0), use_cache=use_cache, **{name: value})[0]
            for alone, got in zip(expected, packed.split(lengths), strict=True):
                torch.testing.assert_close(got, alone, rtol=0, atol=ATOL)


def names_of(lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return arguments that each mark the documents of one sequence."""
    return {
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        "seq_idx": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).unsqueeze(0),
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    }


def check_documents_continued(model: PreTrainedModel) -> None:
    """After a pack in a cache, its last document continues, with position_ids and without."""
    documents = [random_tokens(length, seed=length) for length in (5, 7)]
    for name, value in names_of((5, 7)).items():
        cache = DynamicCache(config=model.config)
        logits_of(model, torch.cat(documents).unsqueeze(0), **{CACHE: cache, name: value})
        token = random_tokens(1, 1, seed=3)
        assert_next(model, documents[1:], cache, token, position_ids=torch.tensor([[7]]))
        assert_next(model, [torch.cat([documents[1], token[0]])], cache, random_tokens(1, 1, seed=4))


def check_documents_generated(model: PreTrainedModel) -> None:
    """`generate` continues the last documents of rows in a cache, one of which has padding on the left."""
    documents = [[random_tokens(length, seed=length) for length in lengths] for lengths in ((5, 4), (3, 2, 2), (8,))]
    ids, mask = left_padded([torch.cat(row) for row in documents])
    positions = torch.zeros_like(ids)
    for row, of_row in zip(documents, positions, strict=True):
        restarting = torch.cat([torch.arange(len(document)) for document in row])
        of_row[len(of_row) - len(restarting) :] = restarting
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=24)):
        logits = logits_of(model, ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
        more = torch.cat([ids, logits[:, -1:].argmax(2)], dim=1)
        generated = new_tokens_of(model, more, torch.cat([mask, mask[:, -1:]], dim=1), **{CACHE: cache})
        last = [torch.cat([row[-1], one[-1:]]) for row, one in zip(documents, more, strict=True)]
        assert_greedy(model, last, generated)


@contextmanager
def crops() -> Iterator[list[int]]:
    """Yield a list to which each `crop` of a cache adds the number of tokens that it takes back."""
    taken: list[int] = []
    original = DynamicCache.crop

    def crop(self: DynamicCache, tokens_to_remove: int) -> None:
        taken.append(-int(tokens_to_remove))
        original(self, tokens_to_remove)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicCache, "crop", crop)
        yield taken


def assert_greedy_with_drafts(model: PreTrainedModel, prompt: Tensor, **options: Any) -> list[int]:
    """Check that drafts are rejected and the tokens greedy; return the number of tokens that each crop took back."""
    with crops() as taken:
        generated = new_tokens_of(model, prompt, **{"max_new_tokens": 20, **options})
    assert_greedy(model, prompt, generated)
    assert sum(n > 0 for n in taken) >= 4, f"drafts were to be rejected, tokens taken back: {taken}"
    return taken


def check_prompt_lookup(model: PreTrainedModel, **options: Any) -> None:
    """The prompt is five tokens, four times: a lookup finds drafts, of which the model accepts few."""
    assert_greedy_with_drafts(model, random_tokens(1, 5).repeat(1, 4), prompt_lookup_num_tokens=4, **options)


def assistant_of(model: PreTrainedModel, assistant: PreTrainedModel | None = None, noise: float = 0.2) -> Any:
    """Return `assistant`, by default a copy of the model, with noise on its head: only some of its drafts are right."""
    assistant = copy.deepcopy(model) if assistant is None else assistant
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head = assistant.get_output_embeddings()
        head = head.raw if hasattr(head, "raw") else head.weight
        head += noise * torch.randn(head.shape, generator=generator, dtype=head.dtype)
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 4, "constant"
    settings.assistant_confidence_threshold = 0.0
    return assistant


def check_assistant(model: PreTrainedModel) -> None:
    taken = assert_greedy_with_drafts(model, random_tokens(1, 9), assistant_model=assistant_of(model))
    assert len(set(taken)) > 2, f"some drafts were to be accepted, tokens taken back: {taken}"
