"""Distinct numbers: every ordered choice is equally likely."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from kvshift_lab.tasks.sampling import distinct_rows

from .cases import seeded


@pytest.mark.parametrize(("count", "population"), [(1, 7), (2, 5), (3, 4), (4, 4)])
def test_every_ordered_choice_is_as_likely(count: int, population: int):
    choices = math.perm(population, count)
    rows = distinct_rows(400 * choices, count, population, seeded(0))
    found = Counter(map(tuple, rows.tolist()))
    assert len(found) == choices
    assert chisquare(list(found.values())).pvalue > 1e-3


@pytest.mark.parametrize(("count", "population"), [(512, 7989), (48, 245), (509, 512), (97, 97), (1, 1)])
def test_no_number_twice(count: int, population: int):
    rows = distinct_rows(101, count, population, seeded(1))
    assert rows.shape == (101, count)
    assert ((rows >= 0) & (rows < population)).all()
    assert all(len(set(row)) == count for row in rows.tolist())


def test_sequences_that_fall_short_are_drawn_again(monkeypatch: pytest.MonkeyPatch):
    """With 5 draws for 4 of 5 numbers, most sequences fall short."""
    monkeypatch.setattr("kvshift_lab.tasks.sampling._draws", lambda count, population: 5)
    rows = distinct_rows(48_000, 4, 5, seeded(2))
    found = Counter(map(tuple, rows.tolist()))
    assert len(found) == 120
    assert chisquare(list(found.values())).pvalue > 1e-3


def test_sequences_differ_across_the_blocks_they_are_made_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvshift_lab.tasks.sampling._CELLS", 3 * 31)
    rows = distinct_rows(11, 7, 31, seeded(3))
    assert len(np.unique(rows, axis=0)) == 11


def test_more_than_there_are():
    with pytest.raises(ValueError, match="count must lie between 1 and population = 5, got 6"):
        distinct_rows(3, 6, 5, seeded(4))
