"""Hop-k: targets against the definition, position by position."""

from __future__ import annotations

import itertools

import pytest

from kvshift_lab.tasks import HopConfig, HopTask, hop

from .cases import check_shape, drawn, seeded


def hops_from(letters: str, start: int, count: int) -> int | None:
    """Return hop_count(start), with positions from 0, or None where it is undefined."""
    at = start
    for _ in range(count):
        before = letters.rfind(letters[at], 0, at)
        if before == -1:
            return None
        at = before + 1
    return at


def words(task: HopTask, ids: list[int]) -> list[str]:
    config = task.config
    names = [str(k) for k in range(config.max_hops + 1)] + [chr(97 + i) for i in range(config.alphabet)] + ["~", "_"]
    assert len(names) == task.vocab_size
    return ["-" if i == -100 else names[i] for i in ids]


@pytest.mark.parametrize(("letters", "alphabet", "max_hops"), [(98, 4, 16), (31, 3, 7), (19, 2, 5), (1, 4, 2)])
def test_every_target_follows_from_the_letters_before_it(letters: int, alphabet: int, max_hops: int):
    task = HopTask(HopConfig(letters=letters, alphabet=alphabet, max_hops=max_hops))
    batch = task.batch(seeded(0), 67)
    check_shape(task, batch, 67)
    columns = (tensor.tolist() for tensor in (batch.input_ids, batch.labels, batch.slices))
    for ids, label_ids, slices in zip(*columns, strict=True):
        row, labels = words(task, ids), words(task, label_ids)
        count, text = int(row[0]), "".join(row[1:-1])
        assert all(one != other for one, other in itertools.pairwise(text))
        assert row[-1] == "_"
        assert labels[:2] == ["-", "_"]
        assert slices[:2] == [-1, -1]
        for start in range(letters):
            at = hops_from(text, start, count)
            assert labels[start + 2] == ("~" if at is None else text[at])
            assert task.slice_names[slices[start + 2]] == ("undefined" if at is None else f"hops_{count}")
            assert at is None or at <= start


def test_hops_are_uniform_or_as_asked():
    batch = HopTask(HopConfig()).batch(seeded(1), 1700)
    counts = batch.input_ids[:, 0].bincount(minlength=17)
    assert len(counts) == 17
    assert counts.min() > 60  # 100 are expected; the bound is four deviations below
    assert (HopTask(HopConfig(hops=5)).batch(seeded(1), 31).input_ids[:, 0] == 5).all()
    assert (HopTask(HopConfig(hops=0)).batch(seeded(1), 31).input_ids[:, 0] == 0).all()


def test_letters_are_a_uniform_walk():
    """Each of the 12 allowed pairs of neighbours is equally likely, also at the start of a sequence."""
    batch = HopTask(HopConfig()).batch(seeded(2), 6000)
    letters = batch.input_ids[:, 1:-1] - 17
    for columns in (letters[:, :2], letters[:, -2:]):
        counts = (4 * columns[:, 0] + columns[:, 1]).bincount(minlength=16)
        assert sorted(counts.tolist())[:4] == [0, 0, 0, 0]
        expected = 6000 / 12
        statistic = float(((counts[counts > 0] - expected) ** 2 / expected).sum())
        assert statistic < 31.3  # chi-squared, 11 degrees of freedom: one in a thousand


@pytest.mark.parametrize("count", [0, 1, 2, 4, 8, 16])
def test_share_of_undefined_targets(count: int):
    """None of 98 targets is undefined at k = 0, 4 are at k = 1, 3 more per hop, half at k = 16, in every sequence."""
    task = HopTask(HopConfig(hops=count))
    undefined = (task.batch(seeded(3), 200).slices == 17).sum(dim=1)
    assert undefined.unique().tolist() == [0 if count == 0 else 4 + 3 * (count - 1)]


@pytest.mark.parametrize("count", [0, 1, 16])
def test_chance_is_what_naming_one_letter_scores(count: int):
    task = HopTask(HopConfig(hops=count))
    batch = task.batch(seeded(4), 700)
    defined = batch.slices == count
    right = ((batch.labels == 18) & defined).sum(dim=1) / defined.sum(dim=1)
    assert task.chance[f"hops_{count}"] == 1 / 4
    assert abs(right.mean() - 1 / 4) < 3 * right.std() / len(right) ** 0.5


def test_ids_are_those_of_sanford_et_al():
    task = HopTask(HopConfig())
    assert task.length == 100
    assert task.vocab_size == 23
    assert (task.first_letter, task.undefined, task.blank) == (17, 21, 22)
    assert task.slice_names == (*(f"hops_{k}" for k in range(17)), "undefined")
    labels = task.batch(seeded(5), 300).labels
    assert sorted(set(labels[:, 2:].unique().tolist())) == [17, 18, 19, 20, 21]
    assert labels[:, 1].unique().tolist() == [22]


def test_the_sequence_that_the_docstring_draws():
    (row,), (labels,), (slices,) = (drawn(hop, name) for name in ("input_ids", "labels", "slices"))
    text = "".join(row[1:-1])
    hops = [hops_from(text, start, int(row[0])) for start in range(10)]
    assert row[-1] == "_"
    assert labels == ["-", "_", *("~" if at is None else text[at] for at in hops)]
    assert slices == [".", ".", *("u" if at is None else row[0] for at in hops)]
