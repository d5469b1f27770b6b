"""Documents packed into one sequence give the results of separate sequences, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvshift.models.versions import CACHE

from ...covering import covering
from .checks import ATOL, VARIANTS, assert_greedy, assert_next, every_variant, logits_of, new_tokens_of, reference_of
from .tiny import SIZES, random_tokens, tiny_model

LENGTHS = (5, 1, 7, 2)


def documents_of(seed: int = 0) -> list[Tensor]:
    return [random_tokens(length, seed=seed + length) for length in LENGTHS]


def packed(documents: list[Tensor]) -> dict[str, Tensor]:
    """Return one sequence with each of the arguments that mark where its documents begin."""
    lengths = [len(document) for document in documents]
    return {
        "input_ids": torch.cat(documents).unsqueeze(0),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        "seq_idx": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).unsqueeze(0),
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    }


@every_variant
def test_the_end_of_one_document_leaves_every_bit_of_the_next(options: dict):
    model = tiny_model(**options)
    first, second = random_tokens(5), random_tokens(7, seed=1)
    results = []
    for last in (3, 44):
        inputs = packed([torch.cat([first[:-1], torch.tensor([last])]), second])
        embeds = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        logits = model(inputs_embeds=embeds, position_ids=inputs["position_ids"], use_cache=False).logits
        parameters = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
        gradients = torch.autograd.grad(logits[0, 5:].square().sum(), [embeds, *parameters])
        assert (gradients[0][0, :5] == 0).all()
        results.append([logits[0, 5:], *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("named", [{}, {"return_seq_idx": True}, {"return_flash_attn_kwargs": True}], ids=str)
def test_the_collator_of_transformers(named: dict):
    model, documents = tiny_model(torch.float64), documents_of()
    collate = DataCollatorWithFlattening(**named)
    batch = collate([{"input_ids": document.tolist()} for document in documents])
    with torch.no_grad():
        outputs = model(**batch, use_cache=False)
    losses = []
    for document, got in zip(documents, outputs.logits[0].split(LENGTHS), strict=True):
        expected = reference_of(model, document)
        torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)
        losses.append(torch.nn.functional.cross_entropy(expected[:-1], document[1:], reduction="sum"))
    torch.testing.assert_close(outputs.loss.double(), sum(losses) / (sum(LENGTHS) - len(LENGTHS)), rtol=1e-5, atol=1e-5)


@covering(
    options={name: VARIANTS[name] for name in ("paper", "sliding window")},
    name=["seq_idx", "position_ids"],
    static={"dynamic": False, "static": True},
)
def test_a_pack_in_pieces_and_on_with_its_last_document(name: str, static: bool, options: dict):
    """The pack is cut anywhere and continued token by token; these tokens see the last document only."""
    model, documents = tiny_model(**options), documents_of()
    inputs, more = packed(documents), random_tokens(4, seed=9)
    expected = [reference_of(model, document) for document in documents[:-1]]
    expected.append(reference_of(model, torch.cat([documents[-1], more])))
    total = sum(LENGTHS)
    for cut in range(1, total):
        if inputs["position_ids"][0, cut] == 0:
            continue  # the first document of a call continues the last one before it
        cache = DynamicCache(config=model.config)
        if static:
            cache = StaticCache(config=model.config, max_cache_len=total + len(more) + 2)
        parts = []
        for piece in (slice(0, cut), slice(cut, total)):
            number = inputs[name][:, piece]
            parts.append(logits_of(model, inputs["input_ids"][:, piece], **{CACHE: cache}, **{name: number}))
        for offset, token in enumerate(more):
            where = {"position_ids": torch.tensor([[LENGTHS[-1] + offset]])} if name == "position_ids" else {}
            parts.append(logits_of(model, token.view(1, 1), **{CACHE: cache}, **where))
        got = torch.cat(parts, dim=1)[0].split([*LENGTHS[:-1], LENGTHS[-1] + len(more)])
        for document, (result, wanted) in enumerate(zip(got, expected, strict=True)):
            torch.testing.assert_close(result, wanted, rtol=0, atol=ATOL, msg=lambda m, c=(cut, document): f"{c}: {m}")


@every_variant
@pytest.mark.parametrize("make", [DynamicCache, None, StaticCache], ids=["bare", "made by the model", "static"])
def test_the_last_document_is_remembered_by_every_cache(options: dict, make: Any):
    model, documents = tiny_model(**options), documents_of()
    cache = StaticCache(config=model.config, max_cache_len=24) if make is StaticCache else make and make()
    inputs = packed(documents)
    for _ in range(2):
        with torch.no_grad():
            cache = model(
                inputs["input_ids"], seq_idx=inputs["seq_idx"], **{CACHE: cache}, use_cache=True
            ).past_key_values
        token = random_tokens(1, 1, seed=9)
        assert_next(model, [documents[-1]], cache, token)
        cache.reset()  # also forgets the document
        row = random_tokens(1, 9)
        logits_of(model, row, **{CACHE: cache})
        assert_next(model, row, cache, token)
        cache.reset()


def test_tokens_are_taken_back_from_the_last_document_alone():
    model, documents = tiny_model(shift_targets=[]), documents_of()[:3]
    for tokens in (1, 3, 7, 8, 13):
        cache = DynamicCache(config=model.config)
        logits_of(model, packed(documents)["input_ids"], seq_idx=packed(documents)["seq_idx"], **{CACHE: cache})
        if tokens == 8:
            with pytest.raises(RuntimeError, match="cannot crop 8 tokens: the last document of a row is shorter"):
                cache.crop(-tokens)
            continue
        cache.crop(-tokens)
        assert_next(model, [documents[-1][: max(0, 7 - tokens)]], cache, random_tokens(1, 1, seed=9))


def test_packs_with_padding_on_either_side():
    model, documents = tiny_model(), documents_of()
    inputs = packed(documents)
    for left, right in ((3, 0), (0, 3)):
        ids = torch.nn.functional.pad(inputs["input_ids"], (left, right), value=7)
        numbers = torch.nn.functional.pad(inputs["seq_idx"], (left, right), value=55)
        mask = torch.nn.functional.pad(torch.ones_like(inputs["input_ids"]), (left, right))
        logits = logits_of(model, ids, seq_idx=numbers, attention_mask=mask)[0, left : left + sum(LENGTHS)]
        for document, got in zip(documents, logits.split(LENGTHS), strict=True):
            torch.testing.assert_close(got, reference_of(model, document), rtol=0, atol=ATOL)


def test_attention_is_handed_what_llama_hands_it_and_the_window(monkeypatch):
    """Flash attention gets the boundaries, and no kernel gets an argument of the shift that it might not know."""
    handed = {}
    find = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name: str, default: Any) -> Any:
        def attention(module, *args: Any, **kwargs: Any) -> Any:
            handed[type(module)] = kwargs
            return find(name, default)(module, *args, **kwargs)

        return attention

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", get_interface)
    ours, llama = tiny_model(sliding_window=6), LlamaForCausalLM(LlamaConfig(**SIZES))
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": [3, 4, 5]}, {"input_ids": [6, 7]}])
    for model in (ours, llama):
        model(**batch, use_cache=False)
    ours, llamas = handed.values()
    assert ours.keys() == llamas.keys() | {"sliding_window"}
    assert ours["sliding_window"] == 6
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"} <= ours.keys()
    torch.testing.assert_close(ours["cu_seq_lens_q"], llamas["cu_seq_lens_q"], rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"use_cache": False}, {}, {"cache_implementation": "static"}], ids=str)
def test_generation_continues_the_last_document_of_a_pack(options: dict):
    model, documents = tiny_model(torch.float64), documents_of()
    inputs = packed(documents)
    generated = new_tokens_of(model, inputs["input_ids"], position_ids=inputs["position_ids"], **options)
    assert_greedy(model, [documents[-1]], generated)


def test_position_ids_of_one_sequence_serve_the_whole_batch():
    model, documents = tiny_model(), documents_of()
    inputs = packed(documents)
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"].roll(1, 1)])
    logits = logits_of(model, ids, position_ids=inputs["position_ids"], use_cache=False)
    for row, got in zip(ids, logits, strict=True):
        for document, part in zip(row.split(LENGTHS), got.split(LENGTHS), strict=True):
            torch.testing.assert_close(part, reference_of(model, document), rtol=0, atol=ATOL)


@every_variant
@pytest.mark.parametrize("make", [StaticCache, DynamicCache])
def test_sequences_of_a_packed_cache_move_with_the_position_where_their_document_began(options: dict, make: Any):
    """Beam search moves sequences in this way."""
    model = tiny_model(**options)
    rows = [documents_of(), list(reversed(documents_of(seed=20)))]
    batch = {name: torch.cat([packed(documents)[name] for documents in rows]) for name in ["input_ids", "seq_idx"]}
    moves = {"reorder_cache": (torch.tensor([1, 0]), [1, 0])}
    if make is DynamicCache:
        moves["batch_select_indices"] = torch.tensor([1]), [1]
        moves["batch_repeat_interleave"] = 2, [0, 0, 1, 1]
    for move, (argument, order) in moves.items():
        cache = make(config=model.config, **({"max_cache_len": 24} if make is StaticCache else {}))
        logits_of(model, batch["input_ids"], seq_idx=batch["seq_idx"], **{CACHE: cache})
        getattr(cache, move)(argument)
        assert_next(model, [rows[i][-1] for i in order], cache, random_tokens(len(order), 1, seed=9))
