"""Sequences of distinct numbers, faster than a permutation of them all.

Shapes: B sequences, M draws, N numbers to choose from.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_CELLS = 2**20  # of the table of last draws, at most: 4 MiB stay in the cache of a core


def distinct_rows(rows: int, count: int, population: int, generator: torch.Generator) -> np.ndarray:
    """`count` different numbers out of 0 ... population - 1 in each sequence, in random order.

    Numbers are drawn with replacement; of equal ones the last is kept, and of what is left the first `count`. No step
    looks at which numbers they are, so every ordered choice is as likely as any other. (To sort 7,989 random keys for
    each sequence takes eighty times as long as to choose 512 so.)

    Returns:
        (rows, count) int64.
    """
    if not 1 <= count <= population:
        raise ValueError(f"count must lie between 1 and population = {population}, got {count}")
    draws = _draws(count, population)
    chosen = np.empty((rows, count), np.int64)
    step = max(1, _CELLS // population)
    for start in range(0, rows, step):
        missing = np.arange(start, min(start + step, rows))
        while len(missing):
            # A sequence that falls short is drawn again as a whole. How many numbers differed tells nothing of which.
            found, enough = _first_distinct(len(missing), draws, count, population, generator)
            chosen[missing[enough]] = found
            missing = missing[~enough]
    return chosen


def _first_distinct(
    rows: int, draws: int, count: int, population: int, generator: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`count` different numbers of each sequence that has as many among its draws, and which sequences these are."""
    numbers_BM = torch.randint(population, (rows, draws), generator=generator).numpy()
    cell_BM = numbers_BM + np.arange(rows)[:, None] * population
    draw_BM = np.broadcast_to(np.arange(draws, dtype=np.int32), cell_BM.shape)
    # Of several writes to one cell the last stays (numpy promises it). Cells that were not drawn hold whatever was in
    # memory and are not read.
    last_draw = np.empty(rows * population, np.int32)
    last_draw[cell_BM] = draw_BM
    distinct_BM = last_draw[cell_BM] == draw_BM
    rank_BM = np.cumsum(distinct_BM, axis=1, dtype=np.int32)
    enough = rank_BM[:, -1] >= count
    kept_BM = distinct_BM & (rank_BM <= count) & enough[:, None]
    return numbers_BM[kept_BM].reshape(-1, count), enough


def _draws(count: int, population: int) -> int:
    """Draws that nearly always bring `count` different numbers: mean of the coupon collector and six deviations."""
    waits = [(population / (population - known), known) for known in range(count)]
    mean = sum(wait for wait, _ in waits)
    variance = sum(wait * wait * known / population for wait, known in waits)
    return math.ceil(mean + 6 * math.sqrt(variance))
