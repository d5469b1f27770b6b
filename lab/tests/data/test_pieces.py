from __future__ import annotations

import os
import signal
import threading
from itertools import pairwise

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from kvshift_lab.core.errors import LabError
from kvshift_lab.data import pieces
from kvshift_lab.data.packing import encoder
from kvshift_lab.data.pieces import can_cut_at_lines, cut_at_lines, without_long_words
from kvshift_lab.data.tokenizers import train_bpe

# Runs of white space become single tokens, which a cut in the wrong place would split.
TEXT = "to be or not to be,\n\n\nthat is\nthe\n\t\tquestion:\r\n\r\n  whether\n \n 't is nobler..\n\nin  the.\n" * 7
BACKEND = train_bpe(iter([TEXT]), 331).backend_tokenizer.to_str()
ENCODER = encoder(BACKEND)


def ids(text: str, name: str) -> list[int]:
    return ENCODERS[name].encode(text, add_special_tokens=False).ids


# How widely used tokenizers split a text into words, besides GPT-2's rule.
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
@hypothesis.given(words=st.lists(st.sampled_from(SYLLABLES)))
@hypothesis.example(words=["be", ".", "\n", "a", ".", "\n", "\n", "a", ".", "\n", "/", "be", "\n", "7"])
def test_cutting_a_long_document_does_not_change_its_tokens(name, words):
    document = "".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE_CHARACTERS", 3)
        parts = cut_at_lines(document)

    assert can_cut_at_lines(ENCODERS[name])
    assert "".join(parts) == document
    assert [token for part in parts for token in ids(part, name)] == ids(document, name)


@pytest.mark.parametrize("name", ENCODERS)
@hypothesis.given(words=st.lists(st.sampled_from(SYLLABLES)))
@hypothesis.example(words=["be", " ", "a", ".", " ", "be", " ", "be", " ", " ", "a", " ", "7", "'s", "be", " ", "a"])
def test_cutting_a_document_without_lines_between_letters_does_not_change_its_tokens(name, words):
    document = "".join(words).replace("\n", "-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE_CHARACTERS", 3)
        patch.setattr(pieces, "_LONGEST_PIECE", 7)
        parts = cut_at_lines(document)
        exact = [before[-1].isalpha() and part[0] == " " and part[1:2].isalpha() for before, part in pairwise(parts)]

    assert "".join(parts) == document
    assert all(len(part) <= 7 for part in parts)
    if all(exact):  # otherwise, some cuts had to be made elsewhere
        assert [token for part in parts for token in ids(part, name)] == ids(document, name)


def test_text_without_a_place_to_cut_is_cut_all_the_same():
    """The cut may be at any character, so memory and the delay of Ctrl-C are bounded."""
    for document in ("a" * (2**22 + 7), " " * 2**22, "a\n" * 5 + "- " * 2**21):
        parts = cut_at_lines(document)
        assert max(map(len, parts)) <= 2**20
        assert "".join(parts) == document
    prose = "to be or not to be, " * 2**18
    assert all(part.startswith((" ", "to")) and part.rstrip(", ")[-1].isalpha() for part in cut_at_lines(prose))


def test_words_that_a_bpe_learns_from_have_a_bound():
    """A word is a run of letters, digits, other signs or white space, as in byte-level tokenizers."""
    for sign in ("a", "語", "7", "-", "_", " ", "\n"):
        long = "be or " + sign * 2500 + "; to"
        parts, longest = without_long_words(long)
        assert "".join(parts) == long
        assert longest in (2500, 2501)  # including the space before it
        assert [len(part) for part in parts][1] == 1024
        words = [word for part in parts for word, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(part)]
        assert max(map(len, words)) <= 3 * 1024 + 1  # 語 has three bytes
    for text in (TEXT * 20, "a1" * 2000, "a" * 1024 + " " + "a" * 1024):
        assert without_long_words(text) == ([text], 0)


def test_a_megabyte_without_white_space_is_learned_from_in_parts(capsys):
    """Training on it as one word would take many minutes."""
    tokenizer = train_bpe(iter(["to be", "a" * 2**20, "a" * 2**20]), 331)
    assert 512 <= max(map(len, tokenizer.get_vocab())) <= 1024
    said = "tokenizer: the text has a word of 1,048,576 characters; such words are split to train on\n"
    assert capsys.readouterr().err == said


def test_ctrl_c_is_heard_while_a_bpe_is_trained(monkeypatch):
    """The library does not check for signals, so it runs in a thread while the main thread waits."""
    released, ended = threading.Event(), threading.Event()

    def words(text):
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(20)
        ended.set()
        yield ["to be"]

    monkeypatch.setattr("kvshift_lab.data.tokenizers._words", words)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            train_bpe(iter([TEXT]), 331)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not ended.is_set()
    released.set()
    assert ended.wait(20)


def test_a_fault_of_the_text_comes_out_of_the_training():
    def text():
        yield TEXT
        raise LabError("line 7")

    with pytest.raises(LabError, match="line 7"):
        train_bpe(text(), 331)


def test_only_tokenizers_that_are_exact_about_it_get_pieces():
    assert can_cut_at_lines(ENCODER)
    spaced = tokenizers.Tokenizer.from_str(BACKEND)
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not can_cut_at_lines(spaced)
    across_lines = tokenizers.Tokenizer.from_str(BACKEND)
    across_lines.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert not can_cut_at_lines(across_lines)
    words = pre_tokenizers.Split(tokenizers.Regex(r"\w+|\W+"), "isolated")  # as in Llama 3 and Qwen
    across_lines.pre_tokenizer = pre_tokenizers.Sequence([words, across_lines.pre_tokenizer])
    assert can_cut_at_lines(across_lines)
    metaspace = tokenizers.Tokenizer(models.BPE())
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not can_cut_at_lines(metaspace)
    prepended = tokenizers.Tokenizer.from_str(BACKEND)
    prepended.normalizer = normalizers.Prepend("_")
    assert not can_cut_at_lines(prepended)
    assert not can_cut_at_lines(tokenizers.Tokenizer(models.BPE()))


def test_bpe_does_not_see_the_cuts(monkeypatch):
    monkeypatch.setattr(pieces, "_PIECE_CHARACTERS", 3)

    assert len(cut_at_lines(TEXT + TEXT)) > 1
    assert train_bpe(iter([TEXT]), 331).backend_tokenizer.to_str() == BACKEND
