"""Windows worked out by hand, and compared with the sequences of training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from kvshift_lab.commands.eval.scoring import Window, score, sequences, windows
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


@pytest.mark.parametrize("batch_size", [3, 16])
def test_longrope_scores_every_window_as_alone(batch_size):
    """Its angles depend on whether the longest sequence of the batch exceeds the original length."""
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    original = {"original_max_position_embeddings": 16}
    model = Phi3ForCausalLM(
        Phi3Config(**sizes, **heads, **original, pad_token_id=None, rope_parameters=rope | original)
    )
    for parameter in model.eval().parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    lengths = (8, 16, 17, 40)  # of the windows, whose tokens are scored but for the first
    rows = [torch.randint(61, (length,)).numpy() for length in lengths]
    group = [Window(row, np.ones(len(row) - 1, np.int64), np.full(len(row) - 1, len(row))) for row in rows]

    def losses(size: int) -> list[np.ndarray]:
        scored = [np.concatenate(part) for part in zip(*score(model, group, size), strict=True)]
        return [scored[0][scored[2] == length] for length in lengths]

    for alone, together in zip(losses(1), losses(batch_size), strict=True):
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)


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
