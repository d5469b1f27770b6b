"""Random choices from uniform numbers, the only source of randomness in the generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Uniform = Callable[[], float]
"""A function that returns a uniform random number in [0, 1)."""

T = TypeVar("T")


def sample_distinct(among: Sequence[T], count: int, uniform: Uniform) -> list[T]:
    """Return `count` different elements of `among`, in random order."""
    left = list(among)
    for at in range(count):
        other = at + int(uniform() * (len(left) - at))
        left[at], left[other] = left[other], left[at]
    return left[:count]
