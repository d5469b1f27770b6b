"""The tokens of a text in pieces equal those of the whole text, and their sizes count all of its bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from kvshift_lab.data import token_stream as streams
from kvshift_lab.data.token_stream import token_stream
from kvshift_lab.data.tokenizers import train_bpe

WORDS = ["one", "two,", "drei", "naïve", "東京", "🙂🙂", "\n", "\n\n", "  ", "Ⅷ", "e\u0301", "end.\nNext"]


def document(seed: int, words: int) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choices(WORDS, k=words))


def metaspace() -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's (SentencePiece): a space before each text, and normalized characters."""
    encode = tokenizers.Tokenizer(models.Unigram())
    encode.normalizer = normalizers.NFKC()
    encode.pre_tokenizer = pre_tokenizers.Metaspace()
    encode.train_from_iterator([document(9, 400)], trainers.UnigramTrainer(vocab_size=90, show_progress=False))
    return encode


TOKENIZERS = {
    "byte level": lambda: train_bpe(iter([document(8, 400)]), 300).backend_tokenizer,
    "metaspace": metaspace,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_make_no_difference(kind, monkeypatch):
    encode = TOKENIZERS[kind]()
    monkeypatch.setattr("kvshift_lab.data.pieces._PIECE_CHARACTERS", 50)
    monkeypatch.setattr(streams, "_BATCH_CHARACTERS", 300)
    documents = [document(seed, words) for seed, words in enumerate((1, 900, 3, 40, 700))]

    parts = list(token_stream(documents, encode))
    assert kind != "byte level" or len(parts) > 3 * len(documents)
    number, ids, sizes = 0, [], []
    for part in parts:
        ids += part.ids.tolist()
        sizes += part.sizes.tolist()
        if part.last:
            assert ids == encode.encode(documents[number], add_special_tokens=False).ids
            assert sum(sizes) == len(documents[number].encode())
            assert min(sizes) >= 0
            number, ids, sizes = number + 1, [], []
    assert number == len(documents)


def test_bytes_of_single_tokens():
    encode = train_bpe(iter(["xy"]), 257).backend_tokenizer  # each token is one byte
    (part,) = token_stream(["aé🙂 b"], encode)
    assert part.last
    assert len(part.ids) == 9
    np.testing.assert_array_equal(part.sizes, [1, 2, 0, 4, 0, 0, 0, 1, 1])
