"""Induction: when a token occurs again, so does the token that followed it before.

Source: the paper's Appendix K (a script), Section 3 and Figures 1a and 1b. Its sequences have 512 tokens out of 7,989.

A sequence of 16 tokens with a pool of 9, in the modes script, latest and raw, from the same draws:

    script       37 40 58 39 69 40 58 40 58 48 39 69 16 39 69 48
    labels        - 40 58 39 69 40 58 40 58 48 39 69 16 39 69 48      loss "all"
    labels        -  -  -  -  -  - 58  - 58  -  - 69  -  - 69  -      loss "repeats"
    slices        .  .  .  .  .  .  0  .  1  .  .  1  .  .  1  .      0 first_repeat, 1 later_repeats

    latest       37 40 58 39 69 40 58 40 58 48 39 69 16 48 39 48
    raw          37 40 58 39 69 40 58 40 58 48 39 69 16 48  0 39

The first repeat is the second 40. All tokens before it are distinct, so its target can only be 58, which followed the
first 40. The successor of 48 was never recorded, because the 39 after it was not new: script draws again, and raw
appends padding (0).

Shapes: B sequences, T positions in a sequence, P tokens in a sequence's pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from kvshift_lab.core.errors import require
from kvshift_lab.tasks.batch import IGNORED, Batch
from kvshift_lab.tasks.option_checks import check_batch_size, check_choices
from kvshift_lab.tasks.sampling import distinct_rows

PAD = 0
_UNKNOWN = -1  # in the map of successors


@dataclass(frozen=True, kw_only=True)
class InductionConfig:
    """Options of the paper's induction data; the defaults are the paper's sizes."""

    mode: Literal["script", "latest", "raw", "single"] = "script"
    """script: the paper's script, corrected (see InductionTask). latest: the target is the token after the latest
    earlier occurrence. raw: the script as printed. single: length - 2 distinct tokens, then one of them again and its
    successor."""
    length: int = 512
    """Tokens per sequence, T."""
    vocab_size: int = 8000
    """Vocabulary size, the script's max_val; ids are below it."""
    lowest_id: int = 11
    """Smallest id of a token, the script's mid_val + 1. Id 0 is the padding, and smaller ids are unused."""
    pool: int | None = None
    """Number of different tokens from which a sequence is drawn, P; None: equal to `length`. Not for mode single."""
    loss: Literal["all", "repeats"] = "all"
    """Labels: every token after the first, or only the targets of repeats."""

    def __post_init__(self) -> None:
        check_choices("induction", self)
        tokens = self.vocab_size - self.lowest_id
        shortest = 6 if self.mode == "single" else 4
        least = f"{shortest} or more in mode {self.mode}"
        require(self.length >= shortest, "induction.length", self.length, least)
        require(self.lowest_id >= 1, "induction.lowest_id", self.lowest_id, "1 or more (0 pads)")
        if self.mode == "single":
            require(self.pool is None, "induction.pool", self.pool, "None in mode single, which uses each token once")
        ids = f"{tokens} ids from lowest_id {self.lowest_id} up to vocab_size {self.vocab_size}"
        drawn = self.tokens_in_pool
        require(2 <= drawn <= tokens, "induction.pool", drawn, f"between 2 and the {ids}")

    @property
    def tokens_in_pool(self) -> int:
        """Number of different tokens in a sequence's pool, P: `pool` or its default; length - 2 in mode single."""
        if self.mode == "single":
            return self.length - 2
        return self.length if self.pool is None else self.pool


class InductionTask:
    """Predict the token after a repeated one.

    The script draws x from the pool of sequence `a`, with a map of successors `succ`, until `a` is full:

        x = last(a)     ignore the draw
        x is new        succ[last(a)] = x; succ[x] = unknown; append x
        x was seen      a repeat: append x, then append succ[x]
        no repeat       start again

    `raw` is this script, including its faults: succ[x] may be unknown when it is appended (-1 in the paper, here the
    padding 0, which is no label), and a repeat in the last slot is cut off before its target. In `script`, x is drawn
    again if its successor is unknown, and the last slot gets another token of the pool, without a target. In both
    modes, the target is the token after the latest occurrence that was followed by a *new* token. `latest` sets
    succ[last(a)] = x at every token instead, so that the target is the token after the latest earlier occurrence, which
    is the paper's definition of an induction head. In `single`, with N = T - 2 distinct tokens x_1 ... x_N, the repeat
    is x_i with i uniform in 2 ... N - 2, the distribution of Theorem 3.4.

    Slices: "first_repeat", the paper's metric, is the target of the first repeat. All tokens before it are distinct, so
    the target is unambiguous. "later_repeats" contains the targets of all other repeats.

    Chance, for first_repeat: the guesser knows which tokens have occurred, but not their order. All tokens other than
    the current one are then equally likely: E[1 / (p - 1)] with p tokens before the repeat.
    """

    slice_names = ("first_repeat", "later_repeats")

    def __init__(self, config: InductionConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.length = config.length
        self.chance = {"first_repeat": _chance(config)}

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """Draw the next `batch_size` sequences; see `Task.batch`."""
        check_batch_size(batch_size)
        config = self.config
        order_BT, target_BT = self._order(batch_size, generator)
        pool_BP = distinct_rows(batch_size, config.tokens_in_pool, config.vocab_size - config.lowest_id, generator)
        known_BT = order_BT != _UNKNOWN
        # _UNKNOWN indexes the last token of the pool, which `where` then replaces
        ids_BT = np.where(known_BT, np.take_along_axis(pool_BP, order_BT, axis=1) + config.lowest_id, PAD)
        target_BT &= known_BT
        trained_BT = known_BT if config.loss == "all" else target_BT
        labels_BT = np.where(trained_BT, ids_BT, IGNORED)
        labels_BT[:, 0] = IGNORED
        first_BT = target_BT & (np.cumsum(target_BT, axis=1) == 1)
        slices_BT = np.where(target_BT, 1 - first_BT, -1)
        return Batch(*(torch.from_numpy(array) for array in (ids_BT, labels_BT, slices_BT)))

    def _order(self, rows: int, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw sequences with tokens numbered in order of appearance, and a mask of the targets of repeats."""
        config = self.config
        if config.mode == "single":
            return _single(rows, config.length, generator)
        order_BT, target_BT = _walk(rows, config, generator)
        while len(missing := np.flatnonzero(~target_BT.any(axis=1))):  # draw sequences without a repeat again
            order_BT[missing], target_BT[missing] = _walk(len(missing), config, generator)
        return order_BT, target_BT


def _walk(rows: int, config: InductionConfig, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Run the script for all sequences at once, with one draw per sequence in each round.

    A draw u, uniform in 0 ... P - 1, stands for the distinct token with index u (from 0) in order of appearance, or for
    a new token if there is none. The pool is in random order, so this is equivalent to drawing from the pool itself.
    """
    length, pool, mode = config.length, config.tokens_in_pool, config.mode
    # Ignored draws are written, too, and overwritten later, which is cheaper than selecting the sequences that keep
    # their draw. The columns after the end receive the writes of finished sequences and targets without a slot. The
    # first column of succ, that of the unknown token, receives successors that must not be recorded.
    width = length + 3
    order = np.zeros(rows * width, np.int32)
    target = np.zeros(rows * width, bool)
    succ = np.full(rows * (pool + 1), _UNKNOWN, np.int32)
    row_start = np.arange(rows) * width
    succ_start = np.arange(rows) * (pool + 1) - _UNKNOWN
    end = row_start + length
    here = row_start.copy()  # index of the next token
    last = np.full(rows, _UNKNOWN)
    known = np.zeros(rows, np.int64)
    while (here < end).any():
        for drawn in torch.randint(pool, (length // 2 + 1, rows), generator=generator).numpy():
            token = np.minimum(drawn, known)
            new = drawn >= known
            at_token = succ_start + token
            after = succ[at_token]
            kept = (token != last) & (here < end)
            if mode != "raw":
                kept &= new | (after != _UNKNOWN) | (here == end - 1)  # the last slot takes any token
            repeat = kept & ~new
            new &= kept
            order[here] = token
            order[here + 1] = after
            target[here + 1] = repeat
            succ[succ_start + np.where(kept if mode == "latest" else new, last, _UNKNOWN)] = token
            last = np.where(repeat, after, np.where(kept, token, last))
            known += new
            here += kept
            here += repeat
    return order.reshape(rows, width)[:, :length], target.reshape(rows, width)[:, :length]


def _single(rows: int, length: int, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens 0 ... N - 1, then i and i + 1, with i uniform in 1 ... N - 3 (x_2 ... x_{N-2}, counted from 1)."""
    tokens = length - 2
    order_BT = np.broadcast_to(np.arange(length), (rows, length)).copy()
    order_BT[:, -2] = torch.randint(1, tokens - 2, (rows,), generator=generator).numpy()
    order_BT[:, -1] = order_BT[:, -2] + 1
    target_BT = np.zeros((rows, length), bool)
    target_BT[:, -1] = True
    return order_BT, target_BT


def _chance(config: InductionConfig) -> float:
    """Return E[1 / (p - 1)], where p is the number of tokens before the first repeat.

        P(p) ~ (p - 1)/(P - 1) prod_{m=2}^{p-1} (1 - (m - 1)/(P - 1)),  p = 2 ... T - 2

    After m different tokens, m - 1 of the P - 1 possible draws are repeats, since the last token is not drawn again.
    With p = T - 1, there would be no slot for the target.
    """
    if config.mode == "single":
        return 1 / (config.tokens_in_pool - 1)
    before = np.arange(2, config.length - 1)
    hazard = np.minimum((before - 1) / (config.tokens_in_pool - 1), 1.0)
    survival = np.concatenate([[1.0], np.cumprod(1 - hazard)[:-1]])
    weight = hazard * survival
    return float((weight / (before - 1)).sum() / weight.sum())
