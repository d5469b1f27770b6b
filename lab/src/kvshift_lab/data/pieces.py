"""Cut long documents into pieces: tokenizing takes about 170 bytes per character, and threads can share the pieces.

No piece is longer than 2^20 characters, and a BPE is trained on no word longer than 2^10 characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

import tokenizers

_PIECE_CHARACTERS = 2**15
_LONGEST_PIECE = 2**20  # if the text has no end of line to cut at
_LONGEST_WORD = 2**10

# A byte-level pre-tokenizer treats each run of letters, digits, other signs or white space as one word.
_OR_MORE = f"{{{_LONGEST_WORD + 1},}}"
_LONG_WORD = re.compile(rf"[^\W\d_]{_OR_MORE}|\d{_OR_MORE}|(?:[^\w\s]|_){_OR_MORE}|\s{_OR_MORE}")


def can_cut_at_lines(encode: tokenizers.Tokenizer) -> bool:
    """Return True if a text has the same tokens when it is cut by `cut_at_lines`.

    This holds for byte-level tokenizers (GPT-2, Llama 3, Qwen and those of `train_bpe`), whose words do not cross the
    end of a line, but not for tokenizers that put a space before a text, or have words of no rule.
    """
    description = json.loads(encode.to_str())
    steps = description["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    if not byte_level or byte_level[0]["add_prefix_space"]:
        return False
    if not byte_level[0]["use_regex"] and not any(step.get("type") == "Split" for step in steps):
        return False
    normalizer = (description["normalizer"] or {}).get("type")
    return normalizer in (None, "NFC")


def cut_documents(
    documents: Iterable[str], encode: tokenizers.Tokenizer, characters: int
) -> Iterator[list[tuple[str, bool]]]:
    """Cut documents into pieces with the same tokens, each with a flag for the last piece of its document.

    If the tokenizer does not allow a text to be cut (see `can_cut_at_lines`), a document is one piece.

    Yields:
        Batches to be tokenized together, which end with the piece that reaches `characters`.
    """
    may_cut = can_cut_at_lines(encode)
    batch: list[tuple[str, bool]] = []
    size = 0
    for document in documents:
        *parts, tail = cut_at_lines(document) if may_cut else [document]
        for piece in (*((part, False) for part in parts), (tail, True)):
            batch.append(piece)
            size += len(piece[0])
            if size >= characters:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def cut_at_lines(document: str) -> list[str]:
    """Cut a long document at line ends that follow no white space and precede a letter or digit.

    If there is no such place within 2^20 characters, the cut is before a space between letters. If there is no such
    space either, the cut is at an arbitrary character, and a token that would have crossed it is split.
    """
    pieces = []
    begin = 0
    while len(document) - begin > _PIECE_CHARACTERS:
        limit = begin + _LONGEST_PIECE
        end = document.find("\n", begin + _PIECE_CHARACTERS - 1, limit) + 1
        while end and (document[end - 2].isspace() or not document[end : end + 1].isalnum()):
            end = document.find("\n", end, limit) + 1
        if not end:
            if limit >= len(document):
                break
            end = document.rfind(" ", begin + 1, limit)
            while end > 0 and not (document[end - 1].isalpha() and document[end + 1].isalpha()):
                end = document.rfind(" ", begin + 1, end)
            end = end if end > 0 else limit
        pieces.append(document[begin:end])
        begin = end
    return [*pieces, document[begin:]]


def without_long_words(piece: str) -> tuple[list[str], int]:
    """Return the piece, cut within words of more than 2^10 characters, and the length of the longest such word or 0.

    The time to train a BPE on a word of n characters grows as n^2.
    """
    parts, begin, longest = [], 0, 0
    for word in _LONG_WORD.finditer(piece):
        longest = max(longest, len(word[0]))
        for end in range(word.start() + _LONGEST_WORD, word.end(), _LONGEST_WORD):
            parts.append(piece[begin:end])
            begin = end
    return [*parts, piece[begin:]], longest
