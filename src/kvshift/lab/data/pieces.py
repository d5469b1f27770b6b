"""Long documents in pieces: tokenizing takes some 170 bytes of memory a character, and threads share pieces out.

No piece is longer than 2^20 characters, whatever the text, and no word that a BPE learns from longer than 2^10.
"""

from __future__ import annotations

import json
import re

import tokenizers

_PIECE_CHARACTERS = 2**15
_LONGEST_PIECE = 2**20  # where the text has no end of line to cut at
_LONGEST_WORD = 2**10

# What a byte-level pre-tokenizer takes for one word: letters, digits, other signs, or white space.
_OR_MORE = f"{{{_LONGEST_WORD + 1},}}"
_LONG_WORD = re.compile(rf"[^\W\d_]{_OR_MORE}|\d{_OR_MORE}|(?:[^\w\s]|_){_OR_MORE}|\s{_OR_MORE}")


def parts_at_lines(encode: tokenizers.Tokenizer) -> bool:
    """Whether a text may be cut where `cut` does without changing its tokens.

    So it is with the byte-level tokenizers (GPT-2, Llama 3, Qwen and ours), whose words do not reach over the end of
    a line; not with those that put a space before a text.
    """
    description = json.loads(encode.to_str())
    steps = description["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    normalizer = (description["normalizer"] or {}).get("type")
    return bool(byte_level) and not byte_level[0]["add_prefix_space"] and normalizer in (None, "NFC")


def cut(document: str) -> list[str]:
    """Cut a long document after an end of line, with no white space before it, and a letter or digit after.

    Where there is no such place for 2^20 characters, it is cut before a space between letters; and where there is none
    either, at any character: a token then ends at the cut that might have reached over it.
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
    """The piece, cut within words of more than 2^10 characters, and how long the longest of these is, or 0.

    A BPE learns from a word of n characters in a time that grows with n^2.
    """
    parts, begin, longest = [], 0, 0
    for word in _LONG_WORD.finditer(piece):
        longest = max(longest, len(word[0]))
        for end in range(word.start() + _LONGEST_WORD, word.end(), _LONGEST_WORD):
            parts.append(piece[begin:end])
            begin = end
    return [*parts, piece[begin:]], longest
