"""Packed sequences against a plain loop, and the model's outputs for them against each document alone."""

from __future__ import annotations

import itertools
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch.nn import functional

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.data import packing, pieces
from kvshift_lab.data.packing import (
    collate,
    encoder,
    make_periodic,
    pack,
    pack_documents,
    pack_stream,
)
from kvshift_lab.data.pieces import cut_at_lines
from kvshift_lab.data.tokenizers import train_bpe

EOS = 0
TOKENIZER = train_bpe(iter(["to be or not to be, that is the question: whether 't is nobler\n" * 7]), 283)
BACKEND = TOKENIZER.backend_tokenizer.to_str()
ENCODER = encoder(BACKEND)
DOCUMENTS = ["to be", "or not", "b", "that is the question:\nwhether", "not", "é 語", "to be or not to be " * 3]


def ids(text: str) -> list[int]:
    return ENCODER.encode(text, add_special_tokens=False).ids


def rows_of(documents: list[str], length: int, how: str = "documents") -> list[dict[str, list[int]]]:
    packed = pack(documents, ENCODER, EOS, length, how)
    return [{name: column.tolist() for name, column in row.items()} for row in packed]


def rows_by_loop(documents: list[str], length: int) -> list[dict[str, list[int]]]:
    """Pack one token at a time."""
    rows: list[dict[str, list[int]]] = []
    row: dict[str, list[int]] = {"input_ids": [], "position_ids": []}
    for document in documents:
        position = 0
        for token in [*ids(document), EOS]:
            row["input_ids"].append(token)
            row["position_ids"].append(position)
            position += 1
            if len(row["input_ids"]) == length:
                rows.append(row)
                row = {"input_ids": [], "position_ids": []}
                position = 0
    return rows


def test_the_example_at_the_head_of_the_module():
    """The documents A, B and C have 3, 1 and 2 tokens, since no merge joins their letters."""
    a1, a2, a3, b1, c1, c2 = [ids(letter)[0] for letter in "zyxwvu"]
    rows = rows_of(["zyx", "w", "vu"], 4)

    assert rows == [
        {"input_ids": [a1, a2, a3, EOS], "position_ids": [0, 1, 2, 3]},
        {"input_ids": [b1, EOS, c1, c2], "position_ids": [0, 1, 0, 1]},
    ]
    labels = collate([{name: torch.tensor(column) for name, column in row.items()} for row in rows])["labels"]
    assert labels.tolist() == [[-100, a2, a3, EOS], [-100, EOS, -100, c2]]


@pytest.mark.parametrize("length", [2, 3, 5, 7, 11, 31])
def test_sequences_equal_a_plain_loop(length):
    assert rows_of(DOCUMENTS, length) == rows_by_loop(DOCUMENTS, length)


def test_concat_holds_the_same_tokens_and_nothing_else():
    separate = rows_of(DOCUMENTS, 7)

    assert rows_of(DOCUMENTS, 7, "concat") == [{"input_ids": row["input_ids"]} for row in separate]


def test_a_sequence_that_exactly_fits_is_kept_and_one_token_less_is_dropped():
    tokens = sum(len(ids(document)) + 1 for document in DOCUMENTS)

    assert len(rows_of(DOCUMENTS, tokens)) == 1
    assert rows_of(DOCUMENTS, tokens + 1) == []


@pytest.mark.parametrize(("batch", "piece"), [(1, 2), (13, 5), (64, 2), (10**6, 10**6)])
def test_borders_of_batches_and_pieces_leave_no_trace(monkeypatch, batch, piece):
    expected = rows_of(DOCUMENTS, 5)
    monkeypatch.setattr(packing, "_BATCH_CHARACTERS", batch)
    monkeypatch.setattr(pieces, "_PIECE_CHARACTERS", piece)

    assert rows_of(DOCUMENTS, 5) == expected


def test_tokenizer_that_puts_a_space_before_a_text_gets_documents_whole(monkeypatch):
    monkeypatch.setattr(pieces, "_PIECE_CHARACTERS", 2)
    encode = encoder(BACKEND)
    encode.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    whole = encode.encode("to\nbe\nor", add_special_tokens=False).ids

    assert whole != [
        token for part in cut_at_lines("to\nbe\nor") for token in encode.encode(part, add_special_tokens=False).ids
    ]
    (row,) = pack(["to\nbe\nor"], encode, EOS, len(whole) + 1, "concat")
    assert row["input_ids"].tolist() == [*whole, EOS]


def test_end_of_text_written_in_a_document_does_not_end_it():
    (row,) = rows_of(["a<|endoftext|>b"], len(ids("a<|endoftext|>b")) + 1)

    assert row["input_ids"].count(EOS) == 1
    assert row["input_ids"][-1] == EOS
    assert row["position_ids"] == list(range(len(row["input_ids"])))


def documents_dataset(documents: list[Any] = DOCUMENTS) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": documents})


@pytest.mark.parametrize("how", ["concat", "documents"])
def test_dataset_and_stream_hold_the_same_sequences(how):
    documents = documents_dataset()
    expected = rows_of(DOCUMENTS, 7, how)
    stored = pack_documents(documents, TOKENIZER, 7, how)
    streamed = pack_stream(documents.to_iterable_dataset(), TOKENIZER, 7, how)

    assert list(streamed) == expected
    assert [{name: column.tolist() for name, column in row.items()} for row in stored] == expected
    for batch in (collate(list(stored)), collate(list(streamed))):
        assert batch["input_ids"].tolist() == [row["input_ids"] for row in expected]
        assert all(column.dtype == torch.int64 for column in batch.values())


def test_documents_of_white_space_and_nulls_are_skipped():
    with_blanks = ["", *itertools.chain(*((document, " \n", None) for document in DOCUMENTS))]
    stored = pack_documents(documents_dataset(with_blanks), TOKENIZER, 5, "documents")

    assert [row["position_ids"].tolist() for row in stored] == [row["position_ids"] for row in rows_of(DOCUMENTS, 5)]


def test_cache_is_used_again_and_not_for_anything_else(monkeypatch):
    documents = documents_dataset()
    other = train_bpe(iter(["another text"]), 259)
    first = pack_documents(documents, TOKENIZER, 7, "concat")
    changed = [
        pack_documents(documents, TOKENIZER, 5, "concat"),
        pack_documents(documents, TOKENIZER, 7, "documents"),
        pack_documents(documents, other, 7, "concat"),
        pack_documents(documents_dataset(DOCUMENTS[1:]), TOKENIZER, 7, "concat"),
    ]
    files = [dataset.cache_files[0]["filename"] for dataset in (first, *changed)]
    assert len(set(files)) == 5

    monkeypatch.setattr(packing, "pack", None)  # a second packing would fail
    again = pack_documents(documents, TOKENIZER, 7, "concat")
    assert again["input_ids"][:].tolist() == first["input_ids"][:].tolist()


def test_collate_gives_what_the_model_takes():
    rows = pack_documents(documents_dataset(), TOKENIZER, 7, "concat")
    batch = collate([rows[0], rows[1], rows[2]])

    assert set(batch) == {"input_ids", "labels"}
    assert all(column.shape == (3, 7) and column.dtype == torch.int64 for column in batch.values())
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()


@pytest.fixture(scope="module")
def model() -> KVShiftLlamaForCausalLM:
    torch.manual_seed(0)
    config = KVShiftLlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=28,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,  # large enough to make a leak visible
    )
    return KVShiftLlamaForCausalLM(config).eval()


def batch_of(documents: list[str], how: str) -> dict[str, torch.Tensor]:
    """Return a batch of one sequence that holds all documents."""
    length = sum(len(ids(document)) + 1 for document in documents)
    return collate(list(pack(documents, ENCODER, EOS, length, how)))


def document_spans(documents: list[str]) -> list[slice]:
    ends = np.cumsum([len(ids(document)) + 1 for document in documents]).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_each_document_is_computed_as_if_alone(model, implementation):
    model.set_attn_implementation(implementation)
    packed = model(**batch_of(DOCUMENTS, "documents"), use_cache=False)

    nll, count = 0.0, 0
    for document, span in zip(DOCUMENTS, document_spans(DOCUMENTS), strict=True):
        alone = torch.tensor([[*ids(document), EOS]])
        logits = model(input_ids=alone, use_cache=False).logits
        torch.testing.assert_close(packed.logits[:, span], logits, rtol=1e-4, atol=1e-5)
        nll += functional.cross_entropy(logits[0, :-1], alone[0, 1:], reduction="sum").item()
        count += alone.shape[1] - 1
    assert packed.loss.item() == pytest.approx(nll / count, rel=1e-5)


@pytest.mark.parametrize("kind", ["text", "random", "both"])
def test_periodic_sequences_repeat_a_span_to_their_end(kind):
    tokens = np.arange(2000, 2200, dtype=np.int32)
    periods, from_text = set(), 0
    for number in range(600):
        row = make_periodic(tokens, number, kind, 1000)
        assert row.dtype == tokens.dtype
        assert len(row) == len(tokens)
        period = next(n for n in range(1, len(row)) if np.array_equal(row[n:], row[:-n]))
        periods.add(period)
        if row.min() >= 2000:
            assert np.array_equal(row[:period], tokens[:period])
            from_text += 1
        else:
            assert 0 <= row.min() <= row.max() < 1000
    assert periods == set(range(16, 64))
    low, high = {"text": (600, 600), "random": (0, 0), "both": (250, 350)}[kind]
    assert low <= from_text <= high
    assert np.array_equal(tokens, np.arange(2000, 2200)), "edited in place"


@pytest.mark.parametrize("kind", ["text", "random", "both"])
def test_training_sequences_are_periodic_read_either_way(kind):
    documents = datasets.Dataset.from_dict({"text": ["to be or not to be, that is the question\n" * 3] * 40})
    plain = [row.numpy().astype(np.int32) for row in pack_documents(documents, TOKENIZER, 64, "concat")["input_ids"]]
    expected = [make_periodic(row, number, kind, len(TOKENIZER)).tolist() for number, row in enumerate(plain)]
    stored = pack_documents(documents, TOKENIZER, 64, "concat", periodic=kind)["input_ids"]
    assert [row.tolist() for row in stored] == expected
    streamed = pack_stream(documents.to_iterable_dataset(), TOKENIZER, 64, "concat", periodic=kind)
    assert [row["input_ids"] for row in streamed] == expected
