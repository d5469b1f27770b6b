"""Long documents in pieces: tokenizing takes some 170 bytes of memory a character, and threads share pieces out."""

from __future__ import annotations

import json

import tokenizers

__all__ = ["cut", "parts_at_lines"]

_PIECE_CHARACTERS = 2**15


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
    """Cut a long document after an end of line, with no white space before it, and a letter or digit after."""
    pieces = []
    begin = 0
    while len(document) - begin > _PIECE_CHARACTERS:
        end = document.find("\n", begin + _PIECE_CHARACTERS - 1) + 1
        while end and (document[end - 2].isspace() or not document[end : end + 1].isalnum()):
            end = document.find("\n", end) + 1
        if not end:
            break
        pieces.append(document[begin:end])
        begin = end
    return [*pieces, document[begin:]]
