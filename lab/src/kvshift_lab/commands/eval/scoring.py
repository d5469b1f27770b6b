"""How well a model predicts a text: windows over its tokens, the loss of each token, sums over blocks of the text.

A sequence of tokens is cut into windows of L tokens, one starting every S tokens. A token is scored in the first window
that contains it. The first token of a window has no context and is not scored in that window. With L = 4:

    sequence      a b c d e f g
    S = 3         a b c d
                        d e f g        scored: b c d | e f g
    S = 2         a b c d
                      c d e f
                          e f g        scored: b c d | e f | g
    S = 4         a b c d | e f g      scored: b c d | f g      (like training rows)

Shapes: B windows, T tokens of the longest of them, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from kvshift_lab.data.token_stream import Tokens

# Size of one observation. Losses of neighbouring tokens are correlated, so a standard error over single tokens would be
# far too small.
BLOCK_BYTES = 4096

# Number of batches whose windows are sorted by length together, to reduce padding.
_SORTED_BATCHES = 16


class Part(NamedTuple):
    """Consecutive tokens of a sequence: their ids, sizes in bytes of text, and block numbers; each (n,)."""

    ids: np.ndarray
    sizes: np.ndarray
    blocks: np.ndarray
    last: bool  # whether the sequence ends with this part


class Window(NamedTuple):
    """Tokens that a model sees at once: ids (n,), and sizes and blocks (s,) of the last s tokens, which are scored."""

    ids: np.ndarray
    sizes: np.ndarray
    blocks: np.ndarray


class ScoredTokens(NamedTuple):
    """Scored tokens: losses in nats, sizes in bytes and block numbers; each (s,)."""

    losses: np.ndarray
    sizes: np.ndarray
    blocks: np.ndarray


def sequences(
    stream: Iterable[Tokens], *, begin: int | None, separator: int | None, block_bytes: int = BLOCK_BYTES
) -> Iterator[Part]:
    """Yield the documents as separate sequences, or joined into one.

    A block is `block_bytes` of a document, or the shorter rest at its end, and so does not depend on the tokenizer. A
    token belongs to the block in which it begins.

    Args:
        stream: Tokens of the documents, in order.
        begin: Token to insert before each sequence; its size is 0 bytes. None: no token.
        separator: Token to insert between documents, which then form one sequence; it belongs to the preceding block.
            None: each document is a sequence.
    """
    block, position = 0, 0  # the first block of this document, and the document's bytes so far
    before = begin
    for ids, sizes, last in stream:
        starts = position + np.cumsum(sizes) - sizes
        position += int(sizes.sum())
        blocks = block + np.minimum(starts, max(position - 1, 0)) // block_bytes
        if before is not None:
            ids, sizes = np.insert(ids, 0, before), np.insert(sizes, 0, 0)
            blocks = np.insert(blocks, 0, max(block - 1, 0))
        yield Part(ids, sizes, blocks, last and separator is None)
        before = None
        if last:
            block, position = block + max(1, -(-position // block_bytes)), 0
            before = begin if separator is None else separator


def windows(parts: Iterable[Part], *, length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of all sequences, in order, as the module's docstring describes."""
    nothing = np.empty(0, np.int64)
    ids, sizes, blocks, seen = nothing, nothing, nothing, 1  # the first `seen` tokens are not scored
    for part in parts:
        ids, sizes, blocks = (
            np.concatenate(pair) for pair in zip((ids, sizes, blocks), (part.ids, part.sizes, part.blocks), strict=True)
        )
        while len(ids) >= length:
            yield Window(ids[:length], sizes[seen:length], blocks[seen:length])
            ids, sizes, blocks, seen = ids[stride:], sizes[stride:], blocks[stride:], max(length - stride, 1)
        if part.last:
            if len(ids) > seen:
                yield Window(ids, sizes[seen:], blocks[seen:])
            ids, sizes, blocks, seen = nothing, nothing, nothing, 1
    if len(ids) > seen:
        yield Window(ids, sizes[seen:], blocks[seen:])


def score(model: Any, wanted: Iterable[Window], batch_size: int) -> Iterator[ScoredTokens]:
    """Yield the losses of the scored tokens batch by batch, not in the order of the text.

    Windows of similar length share a batch. Padding is on the right, where a causal model's scores do not depend on it;
    but those of a model with longrope depend on whether the batch is longer than its original length.
    """
    left, original = iter(wanted), _original_length(model)
    while group := list(islice(left, batch_size * _SORTED_BATCHES)):
        group.sort(key=lambda window: len(window.ids))
        for _, alike in groupby(group, key=lambda window: len(window.ids) > original):
            together = list(alike)
            for begin in range(0, len(together), batch_size):
                yield _score_batch(model, together[begin : begin + batch_size])


def _original_length(model: Any) -> float:
    """Return the length from which on a model's rotary embedding has other angles; infinity if there is none."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return math.inf
    return rope.get("original_max_position_embeddings") or config.original_max_position_embeddings


@torch.inference_mode()
def _score_batch(model: Any, batch: list[Window]) -> ScoredTokens:
    lengths = [len(window.ids) for window in batch]
    ids_BT = torch.zeros(len(batch), max(lengths), dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, window in enumerate(batch):
        ids_BT[row, : lengths[row]] = torch.from_numpy(window.ids)
        mask_BT[row, : lengths[row]] = 1
    ids_BT = ids_BT.to(model.device)
    mask = None if min(lengths) == max(lengths) else mask_BT.to(model.device)
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask, use_cache=False).logits
    losses = []
    for row, window in enumerate(batch):  # row by row: a float32 copy of all logits may not fit into memory
        first, end = lengths[row] - len(window.sizes), lengths[row]
        logits_SV = logits_BTV[row, first - 1 : end - 1].float()
        losses.append(F.cross_entropy(logits_SV, ids_BT[row, first:end], reduction="none"))
    return ScoredTokens(
        torch.cat(losses).double().cpu().numpy(),
        np.concatenate([window.sizes for window in batch]),
        np.concatenate([window.blocks for window in batch]),
    )


class BlockSums:
    """Sums over the blocks of a text.

    Attributes:
        sums: (3, blocks) Sums of losses in nats, number of tokens, and number of bytes.
    """

    def __init__(self) -> None:
        self.sums = np.zeros((3, 0))

    def add(self, scored: ScoredTokens) -> None:
        first, end = int(scored.blocks.min()), int(scored.blocks.max()) + 1
        if end > self.sums.shape[1]:
            self.extend(2 * end)
        for row, values in zip(self.sums, (scored.losses, np.ones_like(scored.losses), scored.sizes), strict=True):
            row[first:end] += np.bincount(scored.blocks - first, weights=values)

    def extend(self, blocks: int) -> None:
        """Make room for `blocks` blocks."""
        self.sums = np.pad(self.sums, ((0, 0), (0, blocks - self.sums.shape[1])))
