"""3-gram: there is one table, and only the whole pair determines the third token."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch

from kvshift_lab.tasks import NGramConfig, NGramTask, ngram

from .cases import check_shape, drawn_numbers, seeded


def table_of(task: NGramTask) -> dict[tuple[int, ...], int]:
    return dict(zip(map(tuple, task.pairs.tolist()), task.targets.tolist(), strict=True))


@pytest.mark.parametrize("length", [3, 51, 510])
def test_every_third_token_is_the_one_of_the_table(length: int):
    task = NGramTask(NGramConfig(length=length))
    table = table_of(task)
    batch = task.batch(seeded(0), 37)
    check_shape(task, batch, 37)
    for row, labels, slices in zip(*(x.tolist() for x in (batch.input_ids, batch.labels, batch.slices)), strict=True):
        seen = set()
        for at in range(0, length, 3):
            pair = (row[at], row[at + 1])
            assert row[at + 2] == table[pair]
            assert labels[at : at + 3] == [-100, -100, table[pair]]
            assert slices[at : at + 3] == [-1, -1, int(pair in seen)]
            seen.add(pair)


def test_the_table_is_the_same_whatever_the_stream():
    task, again = NGramTask(NGramConfig()), NGramTask(NGramConfig(length=6))
    torch.manual_seed(5)
    assert torch.equal(task.pairs, again.pairs)
    assert torch.equal(task.targets, again.targets)
    other = NGramTask(NGramConfig(table_seed=1))
    assert table_of(other).keys() != table_of(task).keys()


def test_the_table_has_about_200_pairs_of_which_doubles_count_once():
    """The expected number is 1024 (1 - (1 - 1/1024)^200) = 181.8, with a standard deviation of 3.7."""
    tasks = [NGramTask(NGramConfig(table_seed=seed)) for seed in range(50)]
    assert all(len(table_of(task)) == len(task.pairs) == len(task.targets) for task in tasks)
    expected = 1024 * (1 - (1 - 1 / 1024) ** 200)
    assert expected == pytest.approx(181.8, abs=0.1)
    assert abs(sum(len(task.pairs) for task in tasks) / 50 - expected) < 3 * 3.7 / 50**0.5
    for tokens in (torch.cat([task.pairs for task in tasks]).flatten(), torch.cat([task.targets for task in tasks])):
        counts = tokens.bincount(minlength=32)
        even = len(tokens) / 32
        assert len(counts) == 32
        assert ((counts - even) ** 2 / even).sum() < 61.1  # chi-squared, 31 degrees of freedom: one in a thousand


def test_the_whole_table_is_each_pair_once():
    task = NGramTask(NGramConfig(length=51))
    whole = task.whole_table()
    assert whole.input_ids.tolist() == [[*pair, target] for pair, target in table_of(task).items()]
    assert whole.labels.tolist() == [[-100, -100, target] for target in task.targets.tolist()]
    assert (whole.slices == torch.tensor([-1, -1, 0])).all()


def test_pairs_are_drawn_uniformly():
    task = NGramTask(NGramConfig(pairs=11))
    count = 40 * 500
    found = Counter(map(tuple, task.batch(seeded(1), count).input_ids.tolist()))
    expected = count / len(task.pairs)
    assert len(found) == len(task.pairs)
    assert sum((times - expected) ** 2 / expected for times in found.values()) < 29.6  # chi-squared, 10: 1 in 1000


@pytest.mark.parametrize("known", [0, 1])
def test_one_token_of_the_pair_does_not_tell_the_third(known: int):
    task = NGramTask(NGramConfig())
    by_known = defaultdict(Counter)
    for pair, target in table_of(task).items():
        by_known[pair[known]][target] += 1
    assert sum(max(counts.values()) for counts in by_known.values()) < 0.3 * len(task.pairs)


def test_chance_is_what_naming_the_most_frequent_token_scores():
    task = NGramTask(NGramConfig())
    ((token, times),) = Counter(task.targets.tolist()).most_common(1)
    batch = task.batch(seeded(2), 5000)
    right = (batch.labels[:, 2] == token).float().mean()
    chance = task.chance["new"]
    assert chance == times / len(task.pairs)
    assert abs(right - chance) < 3 * (chance * (1 - chance) / 5000) ** 0.5


def test_the_sequences_that_the_docstring_draws():
    lines = (drawn_numbers(ngram, name) for name in ("input_ids", "labels", "slices"))
    for row, labels, slices in zip(*lines, strict=True):
        seen: dict[tuple[int, int], int] = {}
        for at in range(0, len(row), 3):
            pair, third = (row[at], row[at + 1]), row[at + 2]
            assert labels[at : at + 3] == [-100, -100, third]
            assert slices[at : at + 3] == [-1, -1, int(pair in seen)]
            assert seen.setdefault(pair, third) == third
