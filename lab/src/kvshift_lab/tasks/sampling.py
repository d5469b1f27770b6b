"""Draw sequences of distinct numbers, faster than by permuting all numbers.

Shapes: B sequences, M draws, N numbers to choose from.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_CELLS = 2**20  # maximum size of the table of last draws: its 4 MiB stay in the cache of a core


def distinct_rows(rows: int, count: int, population: int, generator: torch.Generator) -> np.ndarray:
    """Draw `count` distinct numbers out of 0 ... population - 1 for each sequence, in random order.

    Numbers are drawn with replacement. The last of equal draws is kept, and then the first `count` of the kept ones. No
    step depends on the values of the numbers, so all ordered choices are equally likely. (Sorting 7,989 random keys for
    each sequence takes eighty times as long as choosing 512 this way.)

    Returns:
        (rows, count) int64 array.
    """
    if not 1 <= count <= population:
        raise ValueError(f"count must lie between 1 and population = {population}, got {count}")
    draws = _draws(count, population)
    chosen = np.empty((rows, count), np.int64)
    step = max(1, _CELLS // population)
    for start in range(0, rows, step):
        missing = np.arange(start, min(start + step, rows))
        while len(missing):
            # A sequence with too few distinct numbers is drawn again as a whole. This causes no bias, because the
            # count of distinct numbers is independent of their values.
            found, enough = _first_distinct(len(missing), draws, count, population, generator)
            chosen[missing[enough]] = found
            missing = missing[~enough]
    return chosen


def _first_distinct(
    rows: int, draws: int, count: int, population: int, generator: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` distinct numbers for each sequence that draws as many, and the mask of these sequences."""
    numbers_BM = torch.randint(population, (rows, draws), generator=generator).numpy()
    cell_BM = numbers_BM + np.arange(rows)[:, None] * population
    draw_BM = np.broadcast_to(np.arange(draws, dtype=np.int32), cell_BM.shape)
    # The last of several writes to a cell persists, as numpy guarantees. Cells that were not drawn are uninitialized
    # and are not read.
    last_draw = np.empty(rows * population, np.int32)
    last_draw[cell_BM] = draw_BM
    distinct_BM = last_draw[cell_BM] == draw_BM
    rank_BM = np.cumsum(distinct_BM, axis=1, dtype=np.int32)
    enough = rank_BM[:, -1] >= count
    kept_BM = distinct_BM & (rank_BM <= count) & enough[:, None]
    return numbers_BM[kept_BM].reshape(-1, count), enough


def _draws(count: int, population: int) -> int:
    """Return a number of draws that nearly always gives `count` distinct numbers: the mean of the coupon collector's
    problem plus six standard deviations."""
    waits = [(population / (population - known), known) for known in range(count)]
    mean = sum(wait for wait, _ in waits)
    variance = sum(wait * wait * known / population for wait, known in waits)
    return math.ceil(mean + 6 * math.sqrt(variance))
