"""Attention masks that determine padding and documents, and masks that are refused because they cannot."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from kvshift.models.documents import create_masks
from kvshift.models.versions import CACHE

from .llama.checks import logits_of, new_tokens_of
from .llama.tiny import random_tokens, tiny_model
from .registry import MODELS
from .retrofit.tiny_families import shifted

ATOL = 3e-5
CAUSAL = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
RESTART = torch.tensor([[0, 1, 0, 1, 2]])
KINDS = {
    "Llama": tiny_model,
    "Llama, window": partial(tiny_model, sliding_window=3),
    "GPT-2": partial(shifted, "GPT-2", torch.float32),
    "Gemma 3": partial(shifted, "Gemma 3", torch.float32),
}


def changed(mask: Tensor, *pairs: tuple[int, int], to: bool = False) -> Tensor:
    mask = mask.clone()
    for query, key in pairs:
        mask[..., query, key] = to
    return mask


WRONG: dict[str, tuple[Any, str]] = {
    "numbers of documents": (torch.tensor([[1, 1, 2, 2, 3, 0]]), "1 on tokens and 0 on padding, got other numbers"),
    "one number": (torch.full((1, 6), 2), "1 on tokens and 0 on padding, got other numbers"),
    "added to scores": (torch.tensor([[-1e9, 0, 0, 0, 0, 0]]), "1 on tokens and 0 on padding, got other numbers"),
    "too few columns": (torch.ones(1, 4), r"must be \(1, 6\), 0 tokens in the cache and 6 new ones, got \(1, 4\)"),
    "too many rows": (torch.ones(2, 6), r"must be \(1, 6\), 0 tokens .*, got \(2, 6\)"),
    "a list": ([[1] * 6], "must be a tensor .*; got list"),
    "by type of layer": ({"full_attention": CAUSAL}, "must be a tensor .*; got dict"),
    "blocks": (
        create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu"),
        ".*; got BlockMask",
    ),
    "three dimensions": (CAUSAL[0], r"must have two dimensions, .*, or four, .*; got \(1, 6, 6\)"),
    "integers": (CAUSAL.long(), "four dimensions must be bool, .*; got torch.int64"),
    "fewer keys": (CAUSAL[..., :5], r"must be \(1 or 1, heads or 1, 6, tokens so far\) .*, got \(1, 1, 6, 5\)"),
    "other rows": (CAUSAL.expand(3, -1, -1, -1), r"must be \(1 or 1, heads or 1, 6, .*, got \(3, 1, 6, 6\)"),
    "a tree": (changed(CAUSAL, (4, 3)), "every token see itself and either the token before it or no earlier token"),
    "two documents, one within the other": (changed(CAUSAL, (3, 2), (3, 1), (3, 0), (4, 3), (5, 3)), "token before"),
    "tokens that see what is before them alone": (torch.ones(1, 1, 6, 6).tril(-1).bool(), "see itself"),
    "one token that does not see itself": (changed(CAUSAL, (2, 2)), "see itself"),
    "heads that differ": (
        torch.cat([CAUSAL, changed(CAUSAL, (3, 2), (3, 1), (3, 0))], dim=1).repeat_interleave(3, dim=1),
        "in all heads alike",
    ),
}


@pytest.mark.parametrize(("mask", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_told_is_refused(kind: str, mask: Any, message: str):
    if "GPT-2" in kind or "Gemma" in kind:
        mask = mask[:, :4] if isinstance(mask, Tensor) and mask.shape[1] == 6 and mask.ndim == 4 else mask
    with pytest.raises((TypeError, ValueError), match=f"attention_mask .*{message}"):
        KINDS[kind]()(random_tokens(1, 6), attention_mask=mask, use_cache=False)


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        torch.ones(1, 1, 6, 6, dtype=torch.bool),
        changed(CAUSAL, (0, 1), (0, 2), (1, 2), to=True),
        changed(CAUSAL, (3, 0), (4, 0), (5, 0), (4, 1), (5, 1), (5, 2)),
        torch.zeros(1, 1, 6, 6).masked_fill(~CAUSAL, -torch.inf) - 3.0 * torch.arange(6),
    ],
    ids=["causal", "all", "prefix", "window", "bias"],
)
def test_where_each_token_sees_the_one_before_it_the_row_is_one_document(mask: Tensor):
    masks = create_masks(tiny_model().config, torch.zeros(2, 6, 48), mask, None, torch.tensor([[0, 1, 2, 0, 1, 2]]))
    assert masks["padding"] is masks["documents"] is masks["offsets"] is None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_mask_of_booleans_is_the_mask_whose_numbers_are_added(attention: str):
    """Transformers' eager attention adds a mask to the scores, with 1 for True."""
    number = torch.tensor([0, 0, 0, 1, 1, 1])
    mask = CAUSAL & (number[:, None] == number)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    model, ids = tiny_model(attention=attention), random_tokens(2, 6)
    for given in (mask, added):
        logits = logits_of(model, ids, attention_mask=given, use_cache=False)
        alone = [logits_of(model, part, use_cache=False) for part in ids.split(3, dim=1)]
        torch.testing.assert_close(logits, torch.cat(alone, dim=1), rtol=0, atol=ATOL)


def test_documents_that_are_named_beside_a_mask_of_pairs_must_be_its_own():
    number = torch.tensor([0, 0, 1, 1, 1, 1])
    model, ids = tiny_model(), random_tokens(1, 6)
    apart = CAUSAL & (number[:, None] == number)
    names = {"seq_idx": number[None] + 4, "cu_seq_lens_q": torch.tensor([0, 2, 6])}
    expected = logits_of(model, ids, seq_idx=number[None], use_cache=False)
    for name, value in names.items():
        got = logits_of(model, ids, attention_mask=apart, use_cache=False, **{name: value})
        torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)
        with pytest.raises(ValueError, match="must separate exactly the documents of seq_idx or cu_seq_lens_q"):
            model(ids, attention_mask=CAUSAL, **{name: value})
    with pytest.raises(ValueError, match="must separate exactly the documents of seq_idx or cu_seq_lens_q"):
        model(ids, attention_mask=apart, seq_idx=torch.zeros_like(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_positions_may_count_the_padding_between_tokens(kind: str):
    model, ids = KINDS[kind](), random_tokens(2, 7)
    given: dict[str, Any] = {"attention_mask": torch.tensor([[0, 1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 1, 0]])}
    expected = logits_of(model, ids, **given)
    assert torch.equal(logits_of(model, ids, position_ids=torch.arange(7)[None], **given), expected)


def test_a_mask_of_the_new_tokens_alone_is_refused():
    model, ids = tiny_model(), random_tokens(2, 6)
    store = DynamicCache(config=model.config)
    logits_of(model, ids[:, :4], **{CACHE: store})
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 6\), 4 tokens in the cache and 2 new ones"):
        model(ids[:, 4:], attention_mask=torch.ones(2, 2), **{CACHE: store})


@pytest.mark.parametrize(("columns", "rows", "error"), [(3, 2, RuntimeError), (1, 2, RuntimeError), (4, 1, ValueError)])
def test_a_mask_of_other_shape_is_refused_by_compiled_calls_too(columns: int, rows: int, error: type[Exception]):
    model, ids = tiny_model(), random_tokens(2, 4)
    store = StaticCache(model.config, max_cache_len=12)
    call = torch.compile(model, backend="eager")
    logits_of(call, ids[:, :3], attention_mask=torch.ones(2, 3), **{CACHE: store})
    with pytest.raises(error, match=r"attention_mask must (have a column for every|be \(2, 4\))"):
        logits_of(call, ids[:, 3:], attention_mask=torch.ones(rows, columns), **{CACHE: store})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "store", ["none", "dynamic", "static", pytest.param("static, compiled", marks=pytest.mark.slow)]
)
def test_a_mask_of_fixed_width(kind: str, store: str):
    """Transformers reads the columns of the tokens so far; zeros of those that follow are no padding."""
    model, row = KINDS[kind](), random_tokens(2, 6)
    mask = torch.zeros(2, 12, dtype=torch.long)
    mask[:, :6] = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    expected = logits_of(model, row, attention_mask=mask[:, :6], use_cache=False)
    cache, spans = None, [slice(0, 6)]
    if store != "none":
        spans = [slice(0, 3), slice(3, 4), slice(4, 6)]
        cache = DynamicCache(config=model.config) if store == "dynamic" else StaticCache(model.config, max_cache_len=12)
    call = torch.compile(model, backend="eager") if "compiled" in store else model
    given: dict[str, Any] = {"use_cache": False} if cache is None else {CACHE: cache}
    pieces = [logits_of(call, row[:, at], attention_mask=mask, **given) for at in spans]
    torch.testing.assert_close(
        torch.cat(pieces, dim=1)[mask[:, :6] == 1], expected[mask[:, :6] == 1], atol=ATOL, rtol=0
    )


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_mask_of_pairs_beside_a_cache(static: bool):
    """Keys of a static cache are at their positions, followed by free space; no call begins with a new document."""
    model, ids = tiny_model(), random_tokens(2, 6)
    number = torch.tensor([0, 0, 1, 1, 1, 1])
    mask = torch.nn.functional.pad(CAUSAL & (number[:, None] == number), (0, 3 if static else 0))
    store = StaticCache(config=model.config, max_cache_len=9) if static else DynamicCache(config=model.config)
    pieces = [
        logits_of(model, ids[:, at], attention_mask=mask[:, :, at, : None if static else at.stop], **{CACHE: store})
        for at in (slice(0, 3), slice(3, 4), slice(4, 6))
    ]
    alone = [logits_of(model, part, use_cache=False) for part in ids.split([2, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), torch.cat(alone, dim=1), rtol=0, atol=ATOL)
    begins = torch.nn.functional.pad(torch.eye(1, dtype=torch.bool)[None, None], (6, 2 if static else 0))
    with pytest.raises(ValueError, match="A document cannot begin with the first token after a cache"):
        model(ids[:, :1], attention_mask=begins, **{CACHE: store})


def test_padding_of_a_mask_of_pairs_in_a_cache_that_records_its_past():
    model = tiny_model()
    store = DynamicCache(config=model.config)
    logits_of(model, random_tokens(1, 1), **{CACHE: store})
    store.activate_past_recording()
    mask = changed(CAUSAL[:, :, 1:], (2, 3), (3, 3), (4, 3))
    with pytest.raises(ValueError, match="must be padded on the left for a cache that records its past"):
        model(random_tokens(1, 5), attention_mask=mask, **{CACHE: store})


FLASH: dict[str, tuple[dict[str, Any], bool]] = {
    "by position_ids": ({"position_ids": RESTART}, True),
    "by cu_seq_lens": ({"cu_seq_lens": torch.tensor([0, 2, 5])}, True),
    "by seq_idx alone: position_ids are made from it": ({"seq_idx": RESTART // 2}, True),
    "by seq_idx, position_ids continue": ({"position_ids": torch.arange(5)[None], "seq_idx": RESTART // 2}, False),
    "padding": ({"position_ids": RESTART, "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, False),
    "no padding": ({"position_ids": RESTART, "attention_mask": torch.ones(1, 5)}, True),
    "several rows": ({"position_ids": RESTART.expand(2, -1)}, False),
    "increasing": ({"position_ids": torch.arange(3, 8)[None]}, True),
    "jumps, one document by seq_idx": (
        {"position_ids": torch.tensor([[0, 1, 4, 5, 6]]), "seq_idx": torch.zeros(1, 5, dtype=torch.long)},
        True,
    ),
    "restarts, one document by seq_idx": ({"position_ids": RESTART, "seq_idx": RESTART * 0}, False),
    "begins again at another number": ({"position_ids": torch.tensor([[0, 1, 4, 5, 6]])}, False),
    "continues, two documents by cu_seq_lens": (
        {"position_ids": torch.arange(5)[None], "cu_seq_lens": torch.tensor([0, 2, 5])},
        False,
    ),
    "several rows that restart": ({"position_ids": RESTART.expand(2, -1), "seq_idx": torch.zeros(2, 5).long()}, True),
    "no rows": ({"position_ids": RESTART[:0]}, True),
    "continues a cache": ({"position_ids": torch.arange(4, 9)[None], "cached": 4}, True),
    "continues a cache in several rows": ({"position_ids": torch.arange(4, 9).expand(2, -1), "cached": 4}, True),
    "restarts after a cache": ({"position_ids": RESTART, "cached": 4}, False),
    "restarts after a cache by seq_idx alone": ({"seq_idx": RESTART // 2, "cached": 4}, False),
    "jumps after a cache, one document by seq_idx": (
        {"position_ids": torch.tensor([[4, 5, 9, 10, 11]]), "seq_idx": torch.zeros(1, 5).long(), "cached": 4},
        False,
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize(("given", "right"), FLASH.values(), ids=FLASH)
def test_flash_attention_would_separate_what_is_named(given: dict[str, Any], right: bool, compiled: bool):
    """It begins a document wherever position_ids are 0, unless they increase by one everywhere."""
    torch._dynamo.reset()
    config = tiny_model().config
    config._attn_implementation = "flash_attention_2"
    given = {"attention_mask": None, "past_key_values": None, "position_ids": None, **given}
    if cached := given.pop("cached", 0):
        given["past_key_values"] = DynamicCache(config=config)
        given["past_key_values"].update(*torch.zeros(2, 1, 2, cached, 8), 0)
    batch = 1 if given["position_ids"] is None else len(given["position_ids"])
    error = RuntimeError if compiled else ValueError
    refused = pytest.raises(error, match="flash attention separates documents only within one unpadded row")
    call = torch.compile(create_masks, backend="aot_eager") if compiled else create_masks
    with nullcontext() if right else refused:
        call(config, torch.zeros(batch, 5, 42), **given)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_mask_of_pairs_as_it_is_meant(attention: str):
    """Transformers' flex attention indexes a mask of one row by the batch entry, and reads only one head."""
    config = tiny_model().config
    config._attn_implementation = attention
    with pytest.raises(ValueError, match=f"two dimensions with attn_implementation='{attention}': only eager and"):
        create_masks(config, torch.zeros(1, 6, 42), CAUSAL, None, None)


@pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("kind", KINDS)
def test_names_of_documents_decide_and_not_positions(kind: str, name: str):
    """One document whose positions skip, and two that position_ids do not separate; with a cache and without."""
    model, ids = KINDS[kind](), random_tokens(1, 8)
    values = {
        "seq_idx": [torch.zeros(1, 8, dtype=torch.long), torch.tensor([[3, 3, 3, 3, 3, 1, 1, 1]])],
        "cu_seq_lens_q": [torch.tensor([0, 8]), torch.tensor([0, 5, 8])],
    }
    positions = torch.tensor([[0, 1, 2, 6, 7, 8, 9, 10]])
    for value, lengths in zip(values[name], ([8], [5, 3]), strict=True):
        expected = torch.cat(
            [_by_pieces(model, *part) for part in zip(ids.split(lengths, 1), positions.split(lengths, 1), strict=True)],
            dim=1,
        )
        for use_cache in (False, True):
            for mask in (None, torch.ones_like(ids)):
                given = {"position_ids": positions, "attention_mask": mask, name: value}
                got = logits_of(model, ids, use_cache=use_cache, **given)
                torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)


def _by_pieces(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logits of one document that is fed token by token."""
    store = DynamicCache(config=model.config)
    tokens = zip(ids.split(1, dim=1), positions.split(1, dim=1), strict=True)
    return torch.cat([logits_of(model, token, position_ids=at, **{CACHE: store}) for token, at in tokens], dim=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_calls_refuse_too_and_count_windows_without_padding():
    torch._dynamo.reset()
    model, ids = tiny_model(sliding_window=3), random_tokens(1, 9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])
    given = {"attention_mask": mask, "position_ids": mask.cumsum(1) - 1, "use_cache": False}
    expected = logits_of(model, ids[:, mask[0] == 1], use_cache=False)
    torch.testing.assert_close(logits_of(compiled, ids, **given)[:, mask[0] == 1], expected, rtol=0, atol=ATOL)
    with pytest.raises(RuntimeError, match="1 on tokens and 0 on padding, got other numbers"):
        compiled(ids, **{**given, "attention_mask": 2 * mask})
    causal = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(
        logits_of(compiled, ids, attention_mask=causal, use_cache=False), logits_of(model, ids, attention_mask=causal)
    )
    with pytest.raises(RuntimeError, match="the token before it or no earlier token"):
        compiled(ids, attention_mask=changed(causal, (4, 3)), use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_compiled_window_over_a_cache_refuses_padding_between_tokens(static: bool):
    torch._dynamo.reset()
    model, ids = tiny_model(sliding_window=3), random_tokens(2, 10)
    compiled = torch.compile(model, backend="aot_eager")
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :2] = 0
    expected = logits_of(model, ids, attention_mask=mask, use_cache=False)
    for between in (False, True):
        mask[1, 3:6] = 1 - int(between)
        store = StaticCache(config=model.config, max_cache_len=10) if static else DynamicCache(config=model.config)
        first = logits_of(compiled, ids[:, :6], attention_mask=mask[:, :6], **{CACHE: store})
        if not between:
            second = logits_of(compiled, ids[:, 6:], attention_mask=mask, **{CACHE: store})
            torch.testing.assert_close(torch.cat([first, second], 1)[mask == 1], expected[mask == 1], rtol=0, atol=ATOL)
            continue
        with pytest.raises(RuntimeError, match="attention_mask must have no padding between tokens"):
            logits_of(compiled, ids[:, 6:], attention_mask=mask, **{CACHE: store})


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:<class 'torch\.autograd\.function\.Function'>:DeprecationWarning")  # in torch
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_compiled_window_over_a_cache_takes_documents_with_padding_between(static: bool):
    torch._dynamo.reset()
    model, ids = tiny_model(sliding_window=3), random_tokens(1, 12)
    given = {
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]]),
        "position_ids": torch.arange(6).repeat(2)[None],
    }
    expected = logits_of(model, ids, use_cache=False, **given)
    store = StaticCache(config=model.config, max_cache_len=12) if static else DynamicCache(config=model.config)
    got = logits_of(torch.compile(model, backend="aot_eager"), ids, **given, **{CACHE: store})
    real = given["attention_mask"] == 1
    torch.testing.assert_close(got[real], expected[real], rtol=0, atol=ATOL)


CHUNKS = pytest.param(
    {"prefill_chunk_size": 2},
    marks=pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.23"),
        reason="the masks of its chunks have no columns for cached tokens, which is refused",
    ),
    id="chunks",
)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Llama, queries too, window 4"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}, CHUNKS])
def test_generate_continues_the_last_document_of_a_cache(name, options):
    model = MODELS[name](dtype=torch.float64)
    first, last, more = (random_tokens(1, length, seed=length) for length in (5, 4, 3))
    cache = DynamicCache(config=model.config)
    logits_of(model, torch.cat([first, last], dim=1), seq_idx=torch.tensor([[0] * 5 + [1] * 4]), **{CACHE: cache})
    if "num_beams" in options:
        cache.batch_repeat_interleave(options["num_beams"])  # which `generate` leaves to its caller
    generated = new_tokens_of(model, torch.cat([first, last, more], dim=1), **{CACHE: cache}, **options)
    assert torch.equal(generated, new_tokens_of(model, torch.cat([last, more], dim=1), **options))


def test_generate_refuses_what_it_cannot_continue():
    model = MODELS["Llama"]()
    ids = random_tokens(1, 9)

    def packed():
        cache = DynamicCache(config=model.config)
        logits_of(model, ids, seq_idx=torch.tensor([[0] * 5 + [1] * 4]), **{CACHE: cache})
        return cache

    more = torch.cat([ids, random_tokens(1, 1, seed=3)], dim=1)
    with pytest.raises(ValueError, match=r"assisted decoding cannot continue a .* that holds several documents"):
        new_tokens_of(model, more, prompt_lookup_num_tokens=2, **{CACHE: packed()})
    with pytest.raises(ValueError, match=r"position_ids|attention_mask"):
        model.generate(more[:, -1:], max_new_tokens=2, **{CACHE: packed()})
    crossing = EncoderDecoderCache(packed(), DynamicCache())
    with pytest.raises(ValueError, match="no cross-attention"):
        new_tokens_of(model, more, **{CACHE: crossing})
