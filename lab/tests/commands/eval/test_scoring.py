"""Windows worked out by hand, and compared with the sequences of training."""

from __future__ import annotations

import numpy as np
import pytest

from kvshift_lab.commands.eval.scoring import sequences, windows
from kvshift_lab.data.packing import pack
from kvshift_lab.data.token_stream import Tokens, token_stream
from kvshift_lab.data.tokenizers import train_bpe


def cut(letters: str, stride: int, **options) -> str:
    """Return the windows of a text, with scored tokens in capitals; `^` and `$` are inserted tokens."""
    ids = [np.array([ord(letter) for letter in document], np.int64) for document in letters.split()]
    stream = [Tokens(row[:2], np.ones_like(row[:2]), len(row) <= 2) for row in ids[:1]]
    stream += [Tokens(row[2:], np.ones_like(row[2:]), True) for row in ids[:1] if len(row) > 2]
    stream += [Tokens(row, np.ones_like(row), True) for row in ids[1:]]
    parts = sequences(stream, **{"begin": None, "separator": None, **options})
    texts = []
    for window in windows(parts, length=4, stride=stride):
        text = "".join(map(chr, window.ids))
        scored = len(window.sizes)
        texts.append(text[: len(text) - scored] + text[len(text) - scored :].upper())
    return " ".join(texts)


@pytest.mark.parametrize(
    ("letters", "stride", "expected"),
    [
        ("abcdefg", 3, "aBCD dEFG"),
        ("abcdefg", 2, "aBCD cdEF efG"),
        ("abcdefg", 1, "aBCD bcdE cdeF defG"),
        ("abcdefg", 4, "aBCD eFG"),
        ("abcde", 4, "aBCD"),  # nothing predicts the e
        ("abcd", 3, "aBCD"),
        ("abc", 3, "aBC"),
        ("a", 3, ""),
    ],
)
def test_windows_by_hand(letters, stride, expected):
    assert cut(letters, stride) == expected


def test_documents_apart_and_as_one_sequence():
    assert cut("abcde x yz", 3) == "aBCD dE yZ"
    assert cut("abcde x yz", 3, begin=ord("^")) == "^ABC cDE ^X ^YZ"
    assert cut("abcde x yz", 3, separator=ord("$")) == "aBCD dE$X x$YZ"
    assert cut("abcde x yz", 3, separator=ord("$"), begin=ord("^")) == "^ABC cDE$ $X$Y yZ"


def test_bytes_and_blocks():
    """With blocks of 3 bytes, a token belongs to the block where it begins, a separator to the block before."""
    stream = [
        Tokens(np.array([1, 2]), np.array([2, 2]), False),
        Tokens(np.array([3, 4, 5]), np.array([2, 1, 0]), True),
        Tokens(np.array([6]), np.array([1]), True),
        Tokens(np.array([7, 8]), np.array([3, 1]), True),
    ]
    parts = list(sequences(stream, begin=9, separator=0, block_bytes=3))
    for values, expected in (
        ([part.ids for part in parts], [9, 1, 2, 3, 4, 5, 0, 6, 0, 7, 8]),
        ([part.sizes for part in parts], [0, 2, 2, 2, 1, 0, 0, 1, 0, 3, 1]),
        ([part.blocks for part in parts], [0, 0, 0, 1, 2, 2, 2, 3, 3, 4, 5]),
    ):
        assert np.concatenate(values).tolist() == expected


def test_with_the_window_as_stride_they_are_the_sequences_of_training():
    tokenizer = train_bpe(iter(["the rows of training"]), 270)
    documents = ["the rows of training", "are", "cut from one stream of tokens"]
    encode, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    stream = token_stream(documents, encode)
    found = list(windows(sequences(stream, begin=None, separator=eos), length=7, stride=7))
    rows = list(pack(documents, encode, eos, 7, "concat"))
    assert len(rows) >= 3
    for window, row in zip(found, rows, strict=False):  # training drops an end that fills no sequence
        np.testing.assert_array_equal(window.ids, row["input_ids"])
        assert len(window.sizes) == 6
