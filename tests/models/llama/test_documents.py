"""Documents packed into one row: each gives what it gives alone, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .checks import ATOL, check_documents, logits_of, reference_of
from .reference import reference_logits
from .tiny import SIZES, left_padded, random_tokens, tiny_model

LENGTHS = (5, 1, 7, 2)
VARIANTS = {
    "paper": {},
    "queries too, window 4": {"shift_targets": ["q", "k", "v"], "shift_window": 4},
    "sliding window": {"sliding_window": 3, "shift_window": 3},
    "no shift": {"shift_targets": []},
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def documents_of(seed: int = 0) -> list[Tensor]:
    return [random_tokens(length, seed=seed + length) for length in LENGTHS]


def packed(documents: list[Tensor]) -> dict[str, Tensor]:
    """One row, with all that says where its documents begin."""
    lengths = [len(document) for document in documents]
    return {
        "input_ids": torch.cat(documents).unsqueeze(0),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        "seq_idx": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).unsqueeze(0),
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    }


@every_variant
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_each_document_equals_the_reference(options: dict, attention: str):
    check_documents(tiny_model(attention=attention, **options))


@every_variant
@pytest.mark.parametrize("keys", [[], ["seq_idx"], ["cu_seq_lens_q"], ["seq_idx", "cu_seq_lens_q"]], ids=str)
def test_every_way_to_name_the_documents(options: dict, keys: list[str]):
    model, documents = tiny_model(**options), documents_of()
    inputs = {name: packed(documents)[name] for name in ["input_ids", "position_ids", *keys]}
    logits = logits_of(model, inputs.pop("input_ids"), use_cache=False, **inputs)[0]
    for document, got in zip(documents, logits.split(LENGTHS), strict=True):
        torch.testing.assert_close(got, reference_of(model, document), rtol=0, atol=ATOL)


@every_variant
def test_gradients_of_all_parameters(options: dict):
    model, documents = tiny_model(torch.float64, **options), documents_of()
    upstream = torch.randn(sum(LENGTHS), 61, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    inputs = packed(documents)
    (
        model(inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits[0] * upstream
    ).sum().backward()
    weights = {name: tensor.clone().requires_grad_() for name, tensor in model.state_dict().items()}
    for document, weight in zip(documents, upstream.split(LENGTHS), strict=True):
        (reference_logits(weights, model.config, document.tolist()) * weight).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("keys", [["position_ids"], ["position_ids", "seq_idx"]], ids=str)
def test_several_packed_rows_in_one_batch(keys: list[str]):
    """Their documents begin at different places."""
    model = tiny_model(shift_window=3)
    rows = [documents_of(), list(reversed(documents_of(seed=20)))]
    batch = {name: torch.cat([packed(documents)[name] for documents in rows]) for name in ["input_ids", *keys]}
    logits = logits_of(model, batch.pop("input_ids"), use_cache=False, **batch)
    for documents, row in zip(rows, logits, strict=True):
        for document, got in zip(documents, row.split([len(document) for document in documents]), strict=True):
            torch.testing.assert_close(got, reference_of(model, document), rtol=0, atol=ATOL)


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


@pytest.fixture
def attended(monkeypatch) -> list[tuple[Tensor, Tensor]]:
    """The keys and values that reach attention, layer after layer."""
    seen = []
    find = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name: str, default: Any) -> Any:
        def attention(module, query, key, value, *args: Any, **kwargs: Any) -> Any:
            seen.append((key, value))
            return find(name, default)(module, query, key, value, *args, **kwargs)

        return attention

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", get_interface)
    return seen


@pytest.mark.parametrize(
    ("keys", "use_cache"),
    [
        (["seq_idx"], False),
        (["cu_seq_lens_q"], False),
        (["seq_idx"], True),
        (["cu_seq_lens_q"], True),
        (["position_ids"], True),
        (["position_ids", "seq_idx", "cu_seq_lens_q"], True),
    ],
    ids=str,
)
def test_the_shift_heeds_documents_where_attention_does_not(keys: list[str], use_cache: bool, attended: list):
    """Transformers' masks know of documents by position_ids without cache alone; flash attention knows more.

    So what the first layer hands to attention is looked at.
    """
    model, documents = tiny_model(torch.float64, shift_window=3), documents_of()
    inputs = {name: packed(documents)[name] for name in ["input_ids", *keys]}
    logits_of(model, inputs.pop("input_ids"), use_cache=use_cache, **inputs)
    keys_of_pack, values_of_pack = attended[0]
    start = 0
    for document in documents:
        attended.clear()
        first = 0 if "position_ids" in keys else start  # positions go on through the row where none are given
        positions = torch.arange(first, first + len(document)).unsqueeze(0)
        logits_of(model, document.unsqueeze(0), position_ids=positions, use_cache=False)
        end = start + len(document)
        for got, expected in zip((keys_of_pack, values_of_pack), attended[0], strict=True):
            torch.testing.assert_close(got[:, :, start:end], expected, rtol=0, atol=1e-12)
        start = end


def test_attention_is_handed_what_llama_hands_it_and_the_window(monkeypatch):
    """Flash attention reads the boundaries; nothing of the shift reaches a kernel that might not know it."""
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


def test_a_pack_goes_on_with_its_last_document(attended: list):
    model, documents = tiny_model(torch.float64, shift_window=3), documents_of()
    inputs, cache = packed(documents), DynamicCache(config=model.config)
    inputs.pop("cu_seq_lens_q")
    logits_of(model, inputs.pop("input_ids"), past_key_values=cache, **inputs)
    more = random_tokens(1, 3, seed=9)
    attended.clear()
    positions = torch.arange(2, 5).unsqueeze(0)
    logits_of(model, more, position_ids=positions, past_key_values=cache)
    got = attended[0]
    attended.clear()
    logits_of(model, torch.cat([documents[-1].unsqueeze(0), more], dim=1), use_cache=False)
    for after, alone in zip(got, attended[0], strict=True):
        torch.testing.assert_close(after[:, :, -3:], alone[:, :, -3:], rtol=0, atol=1e-12)


def test_padding_between_positions_begins_no_document():
    """`generate` numbers padding 0, and so the first token behind it."""
    model = tiny_model()
    rows = [random_tokens(9), random_tokens(4)]
    ids, mask = left_padded(rows)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for row, real, got in zip(
        rows, mask.bool(), logits_of(model, ids, attention_mask=mask, position_ids=positions), strict=True
    ):
        torch.testing.assert_close(got[real], reference_of(model, row), rtol=0, atol=ATOL)


def test_one_row_of_position_ids_serves_the_whole_batch():
    model, documents = tiny_model(), documents_of()
    inputs = packed(documents)
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"].roll(1, 1)])
    logits = logits_of(model, ids, position_ids=inputs["position_ids"], use_cache=False)
    for row, got in zip(ids, logits, strict=True):
        for document, part in zip(row.split(LENGTHS), got.split(LENGTHS), strict=True):
            torch.testing.assert_close(part, reference_of(model, document), rtol=0, atol=ATOL)
