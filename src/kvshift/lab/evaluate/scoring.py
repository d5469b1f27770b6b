"""How well a model predicts a text: windows over its tokens, the loss of each token, sums over blocks of the text.

A sequence of tokens is cut into windows of L, one beginning every S tokens. A token is scored in the first window that
holds it, except as the first of a window, where nothing predicts it. With L = 4:

    sequence      a b c d e f g
    S = 3         a b c d
                        d e f g        scored: b c d | e f g
    S = 2         a b c d
                      c d e f
                          e f g        scored: b c d | e f | g
    S = 4         a b c d | e f g      scored: b c d | f g      (as rows of training)

Shapes: B windows, T tokens of the longest of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from kvshift.lab.data.token_stream import Tokens

# Of one document, what counts as one observation. Tokens depend on their neighbours: an error made of single tokens
# would be far too small.
BLOCK_BYTES = 4096

# Blocks that are told apart; where a text has more, sums of neighbours are kept.
_MOST_BLOCKS = 2**14

# Batches of windows that are sorted by length first, so that there is little padding.
_SORTED_BATCHES = 16


class Part(NamedTuple):
    """Consecutive tokens of a sequence: ids, bytes of text that each stands for, number of its block; each (n,)."""

    ids: np.ndarray
    sizes: np.ndarray
    blocks: np.ndarray
    last: bool  # whether the sequence ends here


class Window(NamedTuple):
    """What a model sees at once: ids (n,); sizes and blocks (s,) of the last s of them, which are scored."""

    ids: np.ndarray
    sizes: np.ndarray
    blocks: np.ndarray


class Scored(NamedTuple):
    """Tokens with their losses in nats; each (s,)."""

    losses: np.ndarray
    sizes: np.ndarray
    blocks: np.ndarray


def sequences(
    stream: Iterable[Tokens], *, begin: int | None, separator: int | None, block_bytes: int = BLOCK_BYTES
) -> Iterator[Part]:
    """Documents as sequences of their own, or as one.

    A block is `block_bytes` of a document, or what its end leaves: the same whichever tokenizer is used. A token
    belongs to the block that it begins in.

    Args:
        stream: tokens of the documents, in order.
        begin: token that is put before each sequence; it stands for no text. None: nothing.
        separator: token that is put between documents, which then are one sequence; it belongs to the block before.
            None: each document is a sequence.
    """
    block, position = 0, 0  # the first block of this document, and its bytes so far
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
    """The windows of all sequences, in order; see the head of the module."""
    nothing = np.empty(0, np.int64)
    ids, sizes, blocks, seen = nothing, nothing, nothing, 1  # the first `seen` are not to be scored
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


def score(model: Any, wanted: Iterable[Window], batch_size: int) -> Iterator[Scored]:
    """The losses of the tokens to be scored, batch by batch, not in order.

    Windows of about the same length share a batch, padded at their ends, where causal models do not look.
    """
    left = iter(wanted)
    while group := list(islice(left, batch_size * _SORTED_BATCHES)):
        group.sort(key=lambda window: len(window.ids))
        for begin in range(0, len(group), batch_size):
            yield _score_batch(model, group[begin : begin + batch_size])


@torch.inference_mode()
def _score_batch(model: Any, batch: list[Window]) -> Scored:
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
    for row, window in enumerate(batch):  # one at a time: the float32 copy of all logits may not fit
        first, end = lengths[row] - len(window.sizes), lengths[row]
        logits_SV = logits_BTV[row, first - 1 : end - 1].float()
        losses.append(F.cross_entropy(logits_SV, ids_BT[row, first:end], reduction="none"))
    return Scored(
        torch.cat(losses).double().cpu().numpy(),
        np.concatenate([window.sizes for window in batch]),
        np.concatenate([window.blocks for window in batch]),
    )


class BlockSums:
    """Sums over the blocks of a text, of which as many are kept as fit, whatever the length of the text.

    Attributes:
        sums: (3, blocks): of losses in nats, tokens, and bytes.
        together: neighbouring blocks that stand in one column, a power of two.
    """

    def __init__(self) -> None:
        self.sums = np.zeros((3, _MOST_BLOCKS))
        self.together = 1

    def add(self, scored: Scored) -> None:
        while int(scored.blocks.max()) // self.together >= _MOST_BLOCKS:
            self.merge()
        columns = scored.blocks // self.together
        for row, values in zip(self.sums, (scored.losses, np.ones_like(scored.losses), scored.sizes), strict=True):
            row += np.bincount(columns, weights=values, minlength=_MOST_BLOCKS)

    def merge(self) -> None:
        """Keep the sums of pairs of columns."""
        pairs = self.sums.reshape(3, -1, 2).sum(axis=2)
        self.sums = np.concatenate([pairs, np.zeros_like(pairs)], axis=1)
        self.together *= 2
