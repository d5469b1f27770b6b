"""Pairwise test parameters: few combinations that still contain every pair of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def covering(**axes: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over all names at once, such that any two values of two names occur together in a case.

    Args:
        axes: For each name, its values, or a mapping from test ids to values.
    """
    values = [
        list(axis.items()) if isinstance(axis, Mapping) else [(str(value), value) for value in axis]
        for axis in axes.values()
    ]
    cases = [
        pytest.param(*(value for _, value in case), id="-".join(name for name, _ in case))
        for case in ([axis[i] for axis, i in zip(values, indices, strict=True)] for indices in pairs_reached(values))
    ]
    return pytest.mark.parametrize(list(axes), cases)


def pairs_reached(axes: list[list[Any]]) -> list[tuple[int, ...]]:
    """Return the indices of each case's values: greedily, always the first combination that adds the most new pairs."""
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {combination: set(itertools.combinations(enumerate(combination), 2)) for combination in combinations}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(combinations, key=lambda combination: len(pairs[combination] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
