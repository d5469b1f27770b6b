"""Choices made from a source of uniform numbers, which is all the randomness that the generators see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Uniform = Callable[[], float]
"""Draws from [0, 1)."""

T = TypeVar("T")


def chosen(among: Sequence[T], count: int, uniform: Uniform) -> list[T]:
    """`count` different ones, in random order."""
    left = list(among)
    for at in range(count):
        other = at + int(uniform() * (len(left) - at))
        left[at], left[other] = left[other], left[at]
    return left[:count]
