"""Parameters of tests in the few combinations that reach every pair of values, where all of them would say no more."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def covering(**axes: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over all names at once: any two values of two names meet in a case.

    Args:
        axes: name = its values, or a mapping of their ids to them.
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
    """Indices of values, one of each axis: at every step the first combination with the most pairs that are new."""
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {combination: set(itertools.combinations(enumerate(combination), 2)) for combination in combinations}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(combinations, key=lambda combination: len(pairs[combination] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
