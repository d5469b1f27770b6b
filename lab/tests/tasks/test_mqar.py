"""MQAR: each answer can be read from the sequence, and slots are drawn by their weights."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from kvshift_lab.tasks import MQARConfig, MQARTask, mqar

from .cases import check_shape, drawn_numbers, seeded

FIGURE_2 = [(64, 4), (128, 8), (256, 16)]


@pytest.mark.parametrize(("length", "pairs"), FIGURE_2)
@pytest.mark.parametrize("filler", ["zero", "random"])
def test_every_answer_is_the_value_of_the_key_before(length: int, pairs: int, filler: Any):
    task = MQARTask(MQARConfig(length=length, pairs=pairs, filler=filler))
    batch = task.batch(seeded(0), 61)
    check_shape(task, batch, 61)
    for row, labels, slices in zip(*(x.tolist() for x in (batch.input_ids, batch.labels, batch.slices)), strict=True):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert 1 <= min(keys) <= max(keys) < 4096 <= min(values) <= max(values) < 8192
        asked = [at for at, label in enumerate(labels) if label != -100]
        assert all(at > 2 * pairs and at % 2 == 1 for at in asked)
        assert [labels[at] for at in asked] == [values[keys.index(row[at - 1])] for at in asked]
        assert sorted(row[at - 1] for at in asked) == sorted(keys)
        assert slices == [-1 if label == -100 else 0 for label in labels]
        between = [row[at] for at in range(2 * pairs, length) if at + 1 not in asked]
        assert (set(between) == {0}) == (filler == "zero")


def test_a_random_filler_is_any_of_the_vocabulary():
    batch = MQARTask(MQARConfig(length=60, pairs=1, vocab_size=7, filler="random")).batch(seeded(1), 200)
    tokens = batch.input_ids[:, 3:][(batch.labels == -100)[:, 3:]]
    assert sorted(set(tokens.tolist())) == list(range(7))


def test_slots_are_drawn_one_after_the_other_by_their_weights():
    """P(g, h) = p(g) p(h) / (1 - p(g)) with p(g) ~ (g + 1)^(power - 1), for 5 slots and 2 pairs."""
    task = MQARTask(MQARConfig(length=14, pairs=2, vocab_size=22, power=0.01))
    rows = task.batch(seeded(2), 20_000).input_ids.numpy()
    places = [np.argmax(rows[:, 4:] == rows[:, [2 * pair]], axis=1) // 2 for pair in range(2)]
    found = Counter(zip(*(place.tolist() for place in places), strict=True))

    weights = [(slot + 1) ** -0.99 for slot in range(5)]
    p = [weight / sum(weights) for weight in weights]
    cells = list(itertools.permutations(range(5), 2))
    expected = [20_000 * p[g] * p[h] / (1 - p[g]) for g, h in cells]
    assert set(found) == set(cells)
    assert chisquare([found[cell] for cell in cells], expected).pvalue > 1e-3


def test_chance_is_what_guessing_a_value_of_the_sequence_scores():
    task = MQARTask(MQARConfig())
    batch = task.batch(seeded(3), 2000)
    guess = batch.input_ids[:, [1]].expand_as(batch.labels)
    scored = batch.slices == 0
    right = (guess == batch.labels)[scored].float().mean()
    assert task.chance == {"queries": 1 / 4}
    assert right == 1 / 4  # exact, as each value is asked for once


def test_the_sequence_that_the_docstring_draws():
    (row,), (labels,), (slices,) = (drawn_numbers(mqar, name) for name in ("input_ids", "labels", "slices"))
    values = dict(zip(row[0:6:2], row[1:6:2], strict=True))
    expected = [values[row[at - 1]] if at > 6 and row[at - 1] in values else -100 for at in range(16)]
    assert labels == expected
    assert slices == [-1 if label == -100 else 0 for label in expected]
    assert torch.tensor(row).max() < 20


def test_the_smallest_sequences():
    task = MQARTask(MQARConfig(length=8, pairs=2, vocab_size=6))
    batch = task.batch(seeded(4), 23)
    check_shape(task, batch, 23)
    assert ((batch.labels != -100).sum(dim=1) == 2).all()
