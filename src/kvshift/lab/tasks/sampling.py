"""Rows of distinct numbers, faster than a permutation of them all.

Shapes: B rows, M draws, N numbers to choose from.
"""

from __future__ import annotations

import math

import numpy as np
import torch

__all__ = ["distinct_rows"]

_CELLS = 2**21  # of the table below, at most: with 16 bits each, they stay in the cache of a core


def distinct_rows(rows: int, count: int, population: int, generator: torch.Generator) -> np.ndarray:
    """`count` different numbers out of 0 ... population - 1 in each row, in random order.

    Every ordered choice is as likely as any other: numbers are drawn with replacement, and the first `count` that
    are new are kept. (Sorting 7,989 random keys for each row instead takes ten times as long.)

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
            # A row that falls short is drawn anew as a whole. How many numbers were new tells nothing of which.
            found, enough = _first_new(len(missing), draws, count, population, generator)
            chosen[missing[enough]] = found
            missing = missing[~enough]
    return chosen


def _first_new(
    rows: int, draws: int, count: int, population: int, generator: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` new numbers of each row that has as many among its draws, and which rows these are."""
    numbers_BM = torch.randint(population, (rows, draws), generator=generator).numpy()
    cell_BM = numbers_BM + np.arange(rows)[:, None] * population
    time_BM = np.broadcast_to(np.arange(draws, dtype=np.int32), cell_BM.shape)
    # Of several writes to one cell the last stays (numpy promises it): written backwards, the first draw. Cells that
    # were not drawn hold whatever was in memory and are not read.
    first_drawn = np.empty(rows * population, np.int32)
    first_drawn[cell_BM[:, ::-1]] = time_BM[:, ::-1]
    new_BM = first_drawn[cell_BM] == time_BM
    rank_BM = np.cumsum(new_BM, axis=1, dtype=np.int32)
    enough = rank_BM[:, -1] >= count
    kept_BM = new_BM & (rank_BM <= count) & enough[:, None]
    return numbers_BM[kept_BM].reshape(-1, count), enough


def _draws(count: int, population: int) -> int:
    """Draws that nearly always bring `count` new numbers: mean of the coupon collector and six deviations."""
    waits = [(population / (population - known), known) for known in range(count)]
    mean = sum(wait for wait, _ in waits)
    variance = sum(wait * wait * known / population for wait, known in waits)
    return math.ceil(mean + 6 * math.sqrt(variance))
