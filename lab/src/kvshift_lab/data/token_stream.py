"""Tokenize text of any length in parts, with the number of bytes that each token stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tokenizers

from kvshift_lab.data.pieces import cut_documents

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


def token_stream(documents: Iterable[str], encode: tokenizers.Tokenizer) -> Iterator[Tokens]:
    """Yield the tokens of each document in parts, which equal the tokens of the whole document.

    Args:
        documents: texts; see `cut_documents`.
        encode: see `encoder`.
    """
    for pieces in cut_documents(documents, encode, _BATCH_CHARACTERS):
        yield from _encode(pieces, encode)


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
