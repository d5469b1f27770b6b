"""Pack documents into sequences of tokens.

The documents form one stream of tokens, with the end-of-text token after each document. The stream is cut every T
tokens; an incomplete last sequence is dropped. For A = a1 a2 a3, B = b1 and C = c1 c2, end of text $, and T = 4:

    input_ids     a1 a2 a3  $ | b1  $ c1 c2      (the last $ does not fill a sequence)
    position_ids   0  1  2  3 |  0  1  0  1      packing "documents" only
    labels         - a2 a3  $ |  -  $  - c2      packing "documents"; - is -100: not predicted

`make_periodic` repeats a span of a sequence to its end.

Shapes: B sequences, T positions in a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvshift_lab.data.dataset_cache import cached_dataset, fingerprint
from kvshift_lab.data.pieces import cut_documents
from kvshift_lab.data.sources import Documents, texts

# Characters passed to the tokenizer in one batch, enough to occupy all its threads.
_BATCH_CHARACTERS = 2**20

# Size of the shuffle buffer of a stream, in sequences.
_SHUFFLE_ROWS = 1024

# First part of the seed for periodic sequences; the second part is the index of the sequence.
_PERIODIC = 1663

_SHORTEST_PERIOD, _LONGEST_PERIOD = 16, 63


def pack_documents(
    documents: datasets.Dataset,
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    packing: str,
    periodic: str | None = None,
) -> datasets.Dataset:
    """Return the sequences of `documents`, stored in the cache of Hugging Face datasets."""
    layout = _layout(tokenizer, sequence_length, packing, periodic)
    decisive = [value for value in layout.values() if value is not None]
    key = fingerprint("rows", documents._fingerprint, tokenizers.__version__, *decisive)
    rows = cached_dataset(_rows, _features(sequence_length, packing), key, documents=documents, **layout)
    return rows.with_format("torch")


def pack_stream(
    documents: datasets.IterableDataset,
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    packing: str,
    periodic: str | None = None,
    *,
    seed: int | None = None,
) -> datasets.IterableDataset:
    """Return a stream of the sequences of `documents`; with a seed, it is shuffled in the same order in every pass.

    The `shuffle` of datasets is not used because its order changes when a DataLoader gets its first worker. Sequences
    are lists because `with_format("torch")` converts a stream number by number, only 100 sequences per second.
    """
    return datasets.IterableDataset.from_generator(
        _shuffled_rows,
        features=_features(sequence_length, packing),
        gen_kwargs={
            "seed": seed,
            "documents": documents,
            **_layout(tokenizer, sequence_length, packing, periodic),
        },
    )


def pack(
    text: Iterable[str], encode: tokenizers.Tokenizer, eos: int, sequence_length: int, packing: str
) -> Iterator[dict[str, np.ndarray]]:
    """Yield sequences of T = `sequence_length` tokens; see the module docstring.

    A document longer than a sequence continues in the next one, which is a separate context: its position_ids start at
    0 again, because no token attends to the previous sequence.

    Args:
        text: the documents; none is empty.
        encode: tokenizer without special tokens; see `encoder`.
        eos: id of the end-of-text token.
        packing: "documents" adds position_ids; "concat" does not.

    Yields:
        "input_ids" and "position_ids", each (T,) int32.
    """
    rest = np.empty(0, np.int32)
    rest_starts = np.ones(1, bool)  # whether a document starts at each token of `rest`, and at the one after them
    index_T = np.arange(sequence_length, dtype=np.int32)
    for pieces in _encoded(text, encode):
        tokens = np.concatenate([rest, *(np.array([*ids, eos] if last else ids, np.int32) for ids, last in pieces)])
        starts = np.zeros(len(tokens) + 1, bool)
        starts[: len(rest) + 1] = rest_starts
        ends = len(rest) + np.cumsum([len(ids) + last for ids, last in pieces])
        starts[ends[[last for _, last in pieces]]] = True
        whole = len(tokens) - len(tokens) % sequence_length
        for begin in range(0, whole, sequence_length):
            row = {"input_ids": tokens[begin : begin + sequence_length]}
            if packing == "documents":
                starts_T = starts[begin : begin + sequence_length]
                row["position_ids"] = index_T - np.maximum.accumulate(np.where(starts_T, index_T, 0))
            yield row
        rest, rest_starts = tokens[whole:], starts[whole:]


def collate(sequences: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate sequences into input_ids, labels and, with packing "documents", position_ids; each (B, T) int64.

    Labels are the input_ids: the model compares the output at t with the label at t + 1 and ignores the first label of
    a sequence. With position_ids, the first token of a document has the label -100, so that it is not predicted from
    the previous document. There is no attention_mask because no sequence is padded.
    """
    batch = {
        name: torch.stack([torch.as_tensor(one[name]) for one in sequences]).long()
        for name in ("input_ids", "position_ids")
        if name in sequences[0]
    }
    batch["labels"] = batch["input_ids"].clone()
    if "position_ids" in batch:
        batch["labels"][batch["position_ids"] == 0] = -100
    return batch


def encoder(backend: str) -> tokenizers.Tokenizer:
    """Return a tokenizer that treats special tokens in a text, such as "<|endoftext|>", as ordinary characters."""
    encode = tokenizers.Tokenizer.from_str(backend)
    encode.no_truncation()
    encode.no_padding()
    encode.encode_special_tokens = True
    return encode


def make_periodic(tokens: np.ndarray, number: int, kind: str, vocab_size: int) -> np.ndarray:
    """Return a sequence that repeats a span to its end.

        y[t] = x[t mod n],  n uniform in 16 .. 63

    Args:
        tokens: (T,), T >= 64.
        number: index of the sequence. It alone seeds the draws, which are thus the same for every seed of a run.
        kind: "text": x is `tokens`. "random": x is uniform in 0 .. vocab_size - 1. "both": either, each in half of the
            sequences.
        vocab_size: number of tokens of the tokenizer.
    """
    random = np.random.default_rng([_PERIODIC, number])
    span = tokens[: random.integers(_SHORTEST_PERIOD, _LONGEST_PERIOD + 1)]
    if kind == "random" or (kind == "both" and random.random() < 0.5):
        span = random.integers(vocab_size, size=len(span), dtype=tokens.dtype)
    return np.resize(span, len(tokens))


def _layout(
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    packing: str,
    periodic: str | None,
) -> dict[str, Any]:
    """Return the arguments of `_rows` other than the documents."""
    return {
        "backend": tokenizer.backend_tokenizer.to_str(),
        "eos": tokenizer.eos_token_id,
        "sequence_length": sequence_length,
        "packing": packing,
        "periodic": periodic,
    }


def _rows(
    documents: Documents,
    backend: str,
    eos: int,
    sequence_length: int,
    packing: str,
    periodic: str | None,
) -> Iterator[dict[str, np.ndarray]]:
    encode = encoder(backend)
    for number, row in enumerate(pack(texts(documents), encode, eos, sequence_length, packing)):
        if periodic:
            row["input_ids"] = make_periodic(row["input_ids"], number, periodic, encode.get_vocab_size())
        yield row


def _shuffled_rows(seed: int | None, **options: Any) -> Iterator[dict[str, np.ndarray]]:
    rows = _rows(**options)
    if seed is None:
        yield from rows
        return
    random = np.random.default_rng(seed)
    # Copy each sequence: it is a view that would keep its whole batch in memory.
    waiting = [{name: column.copy() for name, column in row.items()} for row in islice(rows, _SHUFFLE_ROWS)]
    for row in rows:
        chosen = int(random.integers(len(waiting)))
        yield waiting[chosen]
        waiting[chosen] = {name: column.copy() for name, column in row.items()}
    for chosen in random.permutation(len(waiting)):
        yield waiting[chosen]


def _features(sequence_length: int, packing: str) -> datasets.Features:
    columns = ("input_ids", "position_ids") if packing == "documents" else ("input_ids",)
    return datasets.Features({column: datasets.List(datasets.Value("int32"), sequence_length) for column in columns})


def _encoded(text: Iterable[str], encode: tokenizers.Tokenizer) -> Iterator[list[tuple[list[int], bool]]]:
    """Yield batches of pieces of documents as tokens, each with a flag for the last piece of its document."""
    for pieces in cut_documents(text, encode, _BATCH_CHARACTERS):
        encoded = encode.encode_batch_fast([piece for piece, _ in pieces], add_special_tokens=False)
        yield [(encoding.ids, last) for encoding, (_, last) in zip(encoded, pieces, strict=True)]
