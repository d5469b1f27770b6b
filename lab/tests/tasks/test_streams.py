"""Batches by number: the same bits at any time and place; training never meets evaluation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from kvshift_lab.tasks import Batch, Task, TaskBatches, batch_generator, evaluation_batches
from kvshift_lab.tasks.streams import Split

from .cases import TASKS

SEEDS = st.integers(-(2**70), 2**70)
NUMBERS = st.integers(0, 2**31 - 1)


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("input_ids", "labels", "slices"))


@given(SEEDS, NUMBERS, SEEDS, NUMBERS)
def test_no_training_batch_has_the_generator_of_an_evaluation_batch(seed: int, number: int, other: int, at: int):
    training, evaluation = batch_generator("training", seed, number), batch_generator("evaluation", other, at)
    assert 0 <= training.initial_seed() < 2**31 <= evaluation.initial_seed() < 2**32


@given(SEEDS, NUMBERS, NUMBERS)
def test_no_two_batches_of_a_stream_have_the_same_generator(seed: int, number: int, other: int):
    one, two = (batch_generator("training", seed, at).initial_seed() for at in (number, other))
    assert (one == two) == (number == other)


@pytest.mark.parametrize(("split", "lowest"), [("training", 0), ("evaluation", 2**31)])
def test_a_stream_that_reaches_the_end_of_its_half_continues_at_the_start(split: Split, lowest: int):
    to_the_end = lowest + 2**31 - 1 - batch_generator(split, 11, 0).initial_seed()
    assert batch_generator(split, 11, to_the_end).initial_seed() == lowest + 2**31 - 1
    assert batch_generator(split, 11, to_the_end + 1).initial_seed() == lowest


def test_training_and_evaluation_have_no_sequence_in_common():
    for task in TASKS.values():
        training, evaluation = (
            {tuple(row) for batch in batches for row in batch.input_ids.tolist()}
            for batches in (
                TaskBatches(task, split="training", seed=0, batch_size=97, batches=5),
                TaskBatches(task, split="evaluation", seed=0, batch_size=97, batches=5),
            )
        )
        assert len(training) == len(evaluation) == 5 * 97
        assert not training & evaluation


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_batch_depends_on_split_seed_and_number_alone(task: Task):
    batches = TaskBatches(task, split="training", seed=3, batch_size=7, batches=4)
    in_order = list(batches)
    torch.manual_seed(17)
    assert len(batches) == len(in_order) == 4
    assert all(same(batches[number], in_order[number]) for number in (2, 0, 3, 1))
    assert not same(in_order[0], in_order[1])
    assert not same(in_order[0], TaskBatches(task, split="training", seed=4, batch_size=7, batches=4)[0])
    assert not same(in_order[0], TaskBatches(task, split="evaluation", seed=3, batch_size=7, batches=4)[0])


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_generator_continues_from_batch_to_batch(task: Task):
    generator = torch.Generator().manual_seed(5)
    first = task.batch(generator, 11)
    second = task.batch(generator, 11)
    assert not torch.equal(first.input_ids, second.input_ids)
    assert same(first, task.batch(torch.Generator().manual_seed(5), 11))


def test_a_loader_takes_them_as_they_are():
    batches = TaskBatches(TASKS["script"], split="training", seed=0, batch_size=5, batches=3)
    assert all(
        same(one, other)
        for one, other in zip(DataLoader(batches, batch_size=None, num_workers=1), batches, strict=True)
    )


def test_what_cannot_be_is_refused():
    task = TASKS["script"]
    with pytest.raises(ValueError, match="batch_size must be 1 or more, got 0"):
        TaskBatches(task, split="training", seed=0, batch_size=0, batches=3)
    with pytest.raises(ValueError, match="batches must be 1 or more, got 0"):
        TaskBatches(task, split="training", seed=0, batch_size=3, batches=0)
    with pytest.raises(ValueError, match="split must be training or evaluation, got 'test'"):
        TaskBatches(task, split="test", seed=0, batch_size=3, batches=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"number must lie in 0 ... 2\^31 - 1, got 2147483648"):
        TaskBatches(task, split="training", seed=0, batch_size=3, batches=2**31 + 1)
    with pytest.raises(IndexError, match=r"number must lie in 0 \.\.\. 2, got 3"):
        TaskBatches(task, split="training", seed=0, batch_size=3, batches=3)[3]


@pytest.mark.parametrize(("rows", "batch_size", "sizes"), [(11, 4, [4, 4, 3]), (12, 4, [4, 4, 4]), (3, 7, [3])])
def test_evaluation_sequences_come_in_batches_of_one_stream(rows: int, batch_size: int, sizes: list[int]):
    task = TASKS["hop"]
    batches = evaluation_batches(task, rows, batch_size, seed=5, first=13)
    assert [len(batch.input_ids) for batch in batches] == sizes
    for number, (batch, size) in enumerate(zip(batches, sizes, strict=True), start=13):
        assert same(batch, task.batch(batch_generator("evaluation", 5, number), size))
