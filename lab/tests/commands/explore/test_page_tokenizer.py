"""The page's `tokenizer.js` gives the same tokens as the library; other tokenizers are refused by name."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvshift_lab.commands.explore.page_tokenizer import check_in_node, tokenizer_json
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.data.tokenizers import train_bpe

from ...generation_cases import TEXT
from .node import PAGE, node_program, run_module

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = [
    "to be", " or", "not", "It's", "IT'S", "we'LL", "I'ſ", "naïve", "café", "cafe\u0301", "東京",
    "🙂", "👩‍👩‍👧", "١٢٣", "½",
    "3.14159", "1234567", "\n", "\n\n  ", "\t", " ", "   ", "\u00a0", "\u0085", "\u2028", "\ufeff", "e\u0301", "ﬁ", "Ⅷ",
    "<|endoftext|>", "<|x|>", "<|x|", "_snake_case", "x=1;", "(...)", "!?", "—", "\\", "mind", "question:",
    "\x00", "a" * 40, "\r", "\r\n", "\u2029",
]  # fmt: skip


def strings() -> list[str]:
    draw = random.Random(0)
    found = ["", *WORDS, *TEXT]
    while len(found) < 200:
        found.append("".join(draw.choice(WORDS) + draw.choice(["", " "]) for _ in range(draw.randint(1, 12))))
    return found


def byte_level(**pre: Any) -> PreTrainedTokenizerFast:
    tokenizer = train_bpe(iter([*TEXT, "it's we'll 1234567 naïve café"] * 3), 400)
    if "split" in pre:
        split = pre_tokenizers.Split(Regex(pre["split"]), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    return tokenizer


def digits() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer


def normalized() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Qwen's, with added tokens and a token before every text."""
    tokenizer = byte_level(split=LLAMA3)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(
        [AddedToken("<|x|>", normalized=False), AddedToken("<|x|", normalized=False, rstrip=True)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


def by_dots() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose pattern has what JavaScript reads otherwise: a dot, before all kinds of line ends."""
    return byte_level(split=r".|\s[a-f\-]\D?|(?:[^\n.]|\p{Lu}){2}(?=x)")


def by_hyphens() -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits at a text and at a pattern; a hyphen is escaped only within brackets."""
    tokenizer = byte_level(split=r"\-|[\-x]y?|z-")
    parts = [pre_tokenizers.Split(" - ", behavior="removed"), tokenizer.backend_tokenizer.pre_tokenizer]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer


def letters() -> PreTrainedTokenizerFast:
    backend = Tokenizer(
        models.WordLevel({"<unk>": 0} | {letter: 11 + i for i, letter in enumerate("abcdeotr")}, "<unk>")
    )
    split = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


TOKENIZERS = {
    "GPT-2": byte_level,
    "Llama 3": lambda: byte_level(split=LLAMA3),
    "digits": digits,
    "Qwen": normalized,
    "letters": letters,
    "dots": by_dots,
    "hyphens": by_hyphens,
}


ENCODE = """
  const tokenizer = new page.Tokenizer(given.tokenizer);
  const ids = given.strings.map((text) => tokenizer.encode(text));
  return [ids, ids.map((line) => line.map((id) => tokenizer.text(id)))];
"""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_two_hundred_strings(name: str, tmp_path: Path):
    tokenizer = TOKENIZERS[name]()
    given = {"tokenizer": json.loads(tokenizer_json(tokenizer, name)), "strings": strings()}
    ids, texts = run_module("tokenizer.js", ENCODE, given, tmp_path)
    expected = [tokenizer(text)["input_ids"] for text in strings()]
    assert len(expected) == 200
    for text, found, right in zip(strings(), ids, expected, strict=True):
        assert found == right, text
    assert len({tuple(line) for line in ids}) > 100  # the texts differ
    if name == "GPT-2":
        assert ["".join(line) for line in texts[1:6]] == WORDS[:5]
        assert "".join(texts[7]) == "I'⟨c5⟩⟨bf⟩"  # two tokens hold the bytes of one character


def split_by(pattern: Any, behavior: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior), pre_tokenizers.ByteLevel()])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"normalizer": normalizers.Lowercase()}, "the normalizer Lowercase"),
        ({"pre_tokenizer": pre_tokenizers.Metaspace()}, "the pre-tokenizer Metaspace"),
        ({"pre_tokenizer": None}, "a BPE that is not byte-level"),
        ({"model": models.Unigram([("a", 0.0)])}, "a model of the type Unigram"),
        ({"pre_tokenizer": split_by(Regex(r"\p{L}++"), "isolated")}, "of which '++' is not translated"),
        ({"pre_tokenizer": split_by(Regex("(?i:[a-f])"), "isolated")}, "of which '[a-f]' is not translated (ranges)"),
        ({"pre_tokenizer": split_by(Regex("(?i:ss)"), "isolated")}, "letters that match one character together"),
        ({"pre_tokenizer": split_by(Regex("(?i:(?:f)f)"), "isolated")}, "letters that match one character together"),
        ({"pre_tokenizer": split_by(Regex("(?i:h\u0331)"), "isolated")}, "(case of other letters than A to Z)"),
        ({"pre_tokenizer": split_by(Regex("a|"), "isolated")}, "the pattern 'a|', which matches nothing at all, too"),
        ({"pre_tokenizer": split_by(Regex("(?=a)"), "isolated")}, "which matches nothing at all, too"),
        ({"pre_tokenizer": split_by(Regex("a**b"), "isolated")}, "the pattern 'a**b', which is not translated"),
        ({"pre_tokenizer": split_by(Regex(r"\p{Han}+"), "isolated")}, "not a general category of Unicode"),
        ({"pre_tokenizer": split_by(Regex(r"\w+"), "isolated")}, "of which '\\\\w' is not translated"),
        ({"pre_tokenizer": split_by(Regex("^a"), "isolated")}, "of which '^a' is not translated"),
        ({"pre_tokenizer": split_by(Regex("[a-z&&[b]]"), "isolated")}, "is not translated"),
        ({"pre_tokenizer": split_by(" ", "merged_with_next")}, "a split of behavior MergedWithNext"),
        ({}, "the added token 'x'"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_what_the_page_cannot_compute_is_named(change: dict[str, Any], named: str):
    tokenizer = byte_level()
    for part, value in change.items():
        setattr(tokenizer.backend_tokenizer, part, value)
    if not change:
        tokenizer.backend_tokenizer.add_tokens([AddedToken("x", single_word=True)])
    with pytest.raises(LabError, match="tokenizer: the one of runs/mine has ") as raised:
        tokenizer_json(tokenizer, "runs/mine")
    assert named in str(raised.value)


def test_overlapping_added_tokens_of_two_passes_are_refused():
    """Those that match before normalization win over others that begin earlier."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.add_tokens([AddedToken("ab", normalized=True), AddedToken("bc", normalized=False)])
    with pytest.raises(LabError, match="the added tokens 'bc' and 'ab', which overlap and are matched in two passes"):
        tokenizer_json(tokenizer, "runs/mine")


def test_the_page_is_compared_with_the_library_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copy(PAGE / "tokenizer.js", tmp_path)
    text = tokenizer_json(byte_level(split=LLAMA3), "any")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    node = node_program()
    monkeypatch.setattr(shutil, "which", lambda name: node)
    check_in_node(tmp_path)
    other = json.loads(text)
    other["sample"][1]["ids"][0] += 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(RunFailedError, match=r'other tokens than the library for the text "To be, or not to be'):
        check_in_node(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check_in_node(tmp_path)  # the browser compares


def test_decoders_do_not_matter():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    assert tokenizer_json(tokenizer, "any")
