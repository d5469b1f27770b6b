from __future__ import annotations

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from kvshift.lab.data import pieces
from kvshift.lab.data.packing import encoder
from kvshift.lab.data.pieces import cut, parts_at_lines
from kvshift.lab.data.tokenizers import train_bpe

# Runs of white space become tokens of their own, which a cut in the wrong place would split.
TEXT = "to be or not to be,\n\n\nthat is\nthe\n\t\tquestion:\r\n\r\n  whether\n \n 't is nobler..\n\nin  the.\n" * 7
BACKEND = train_bpe(iter([TEXT]), 331).backend_tokenizer.to_str()
ENCODER = encoder(BACKEND)


def ids(text: str, name: str) -> list[int]:
    return ENCODERS[name].encode(text, add_special_tokens=False).ids


# How tokenizers in use part a text into words, beside GPT-2's own rule.
WORDS = {
    "Llama 3, Qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "GPT-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def trained_with(words: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=331, initial_alphabet=alphabet, show_progress=False)
    )
    return encoder(backend.to_str())


ENCODERS = {"GPT-2": ENCODER, **{name: trained_with(words) for name, words in WORDS.items()}}


SYLLABLES = ["a", "be", "\n", "\r\n", " ", "  ", "\t", "'s", "7", "é", "語", ".", "\u2028", "/"]


@pytest.mark.parametrize("name", ENCODERS)
@hypothesis.given(
    words=st.lists(
        st.sampled_from(["a", "be", "\n", "\r\n", " ", "  ", "\t", "'s", "7", "é", "語", ".", "\u2028", "/"])
    )
)
@hypothesis.example(words=["be", ".", "\n", "a", ".", "\n", "\n", "a", ".", "\n", "/", "be", "\n", "7"])
def test_cutting_a_long_document_does_not_change_its_tokens(name, words):
    document = "".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE_CHARACTERS", 3)
        parts = cut(document)

    assert parts_at_lines(ENCODERS[name])
    assert "".join(parts) == document
    assert [token for part in parts for token in ids(part, name)] == ids(document, name)


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
    assert train_bpe(iter([TEXT]), 331).backend_tokenizer.to_str() == BACKEND
