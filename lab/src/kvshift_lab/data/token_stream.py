"""Tokenize text of any length in parts, with the number of bytes that each token stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tokenizers

from kvshift_lab.data.pieces import can_cut_at_lines, cut_at_lines

# Characters passed to the tokenizer in one batch, enough to occupy all its threads; each takes about 170 bytes.
_BATCH_CHARACTERS = 2**18


class Tokens(NamedTuple):
    """Consecutive tokens of one document.

    Attributes:
        ids: (n,) int64.
        sizes: (n,) int64: bytes of UTF-8 from the end of the previous token to the end of this one. A character that
            is split into several tokens counts for the first of them. The sum is the size of the text.
        last: whether the document ends here.
    """

    ids: np.ndarray
    sizes: np.ndarray
    last: bool


def token_stream(pieces: Iterable[tuple[str, bool]], encode: tokenizers.Tokenizer) -> Iterator[Tokens]:
    """Yield the tokens of documents that are given in pieces; they equal the tokens of the whole documents.

    If the tokenizer does not allow a text to be cut (see `can_cut_at_lines`), each document is tokenized as a whole.

    Args:
        pieces: see `read_pieces`.
        encode: see `encoder`.
    """
    waiting: list[tuple[str, bool]] = []
    characters = 0
    for piece in _parts(pieces, may_cut=can_cut_at_lines(encode)):
        waiting.append(piece)
        characters += len(piece[0])
        if characters >= _BATCH_CHARACTERS:
            yield from _encode(waiting, encode)
            waiting, characters = [], 0
    yield from _encode(waiting, encode)


def _parts(pieces: Iterable[tuple[str, bool]], *, may_cut: bool) -> Iterator[tuple[str, bool]]:
    rest: list[str] = []
    for text, last in pieces:
        rest.append(text)
        if not (last or may_cut):
            continue
        *parts, tail = cut_at_lines("".join(rest)) if may_cut else ["".join(rest)]
        yield from ((part, False) for part in parts)
        if last:
            yield tail, True
        rest = [] if last else [tail]


def _encode(pieces: list[tuple[str, bool]], encode: tokenizers.Tokenizer) -> Iterator[Tokens]:
    encoded = encode.encode_batch([text for text, _ in pieces], add_special_tokens=False)
    for (text, last), encoding in zip(pieces, encoded, strict=True):
        ends = np.array([end for _, end in encoding.offsets], np.int64)
        if not text.isascii():
            code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            lengths = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
            ends = np.concatenate([[0], np.cumsum(lengths)])[ends]
        if len(ends):
            ends = np.maximum.accumulate(ends)
            ends[-1] = len(text.encode()) if not text.isascii() else len(text)
        yield Tokens(np.array(encoding.ids, np.int64), np.diff(ends, prepend=0), last)
