from __future__ import annotations

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from kvshift.lab.data import pieces
from kvshift.lab.data.packing import encoder
from kvshift.lab.data.pieces import cut, parts_at_lines
from kvshift.lab.data.tokenizers import train_bpe

TEXT = "to be or not to be, that is the question: whether 't is nobler\n" * 7
BACKEND = train_bpe(iter([TEXT]), 283).backend_tokenizer.to_str()
ENCODER = encoder(BACKEND)


def ids(text: str) -> list[int]:
    return ENCODER.encode(text, add_special_tokens=False).ids


@hypothesis.given(
    st.lists(st.sampled_from(["a", "be", "\n", "\r\n", " ", "  ", "\t", "'s", "7", "é", "語", ".", "\u2028", "/"]))
)
def test_cutting_a_long_document_does_not_change_its_tokens(words):
    document = "".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE_CHARACTERS", 3)
        parts = cut(document)

    assert "".join(parts) == document
    assert [token for part in parts for token in ids(part)] == ids(document)


def test_long_document_is_cut():
    """Else the test above tests nothing."""
    document = "to be or not to be\n" * 10_000
    parts = cut(document)

    assert max(map(len, parts)) <= pieces._PIECE_CHARACTERS + len("to be or not to be\n")
    assert "".join(parts) == document


def test_only_tokenizers_that_are_exact_about_it_get_pieces():
    assert parts_at_lines(ENCODER)
    spaced = tokenizers.Tokenizer.from_str(BACKEND)
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not parts_at_lines(spaced)
    metaspace = tokenizers.Tokenizer(models.BPE())
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not parts_at_lines(metaspace)
    prepended = tokenizers.Tokenizer.from_str(BACKEND)
    prepended.normalizer = normalizers.Prepend("_")
    assert not parts_at_lines(prepended)
    assert not parts_at_lines(tokenizers.Tokenizer(models.BPE()))


def test_bpe_does_not_see_the_cuts(monkeypatch):
    monkeypatch.setattr(pieces, "_PIECE_CHARACTERS", 3)

    assert len(cut(TEXT + TEXT)) > 1
    assert train_bpe(iter([TEXT]), 283).backend_tokenizer.to_str() == BACKEND
