"""Batches by number: task, split, seed and number determine a batch exactly, in any order, process or worker."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch.utils.data import Dataset

from kvshift_lab.core.seeds import seed_for
from kvshift_lab.tasks.batch import Batch, Task

Split = Literal["training", "evaluation"]

_SEEDS = 2**31  # seeds per split: torch's CPU generator uses 32 bits of the seed, and the highest one is the split


def batch_generator(split: Split, seed: int, number: int) -> torch.Generator:
    """Return the generator of one batch.

        seed of the generator = [split == evaluation] 2^31 + (seed_for("batches", seed) + number) mod 2^31

    Thus a training batch never shares its seed with an evaluation batch, for any seeds of the streams, and no two
    batches of a stream share a seed.
    """
    if split not in get_args(Split):
        raise ValueError(f"split must be training or evaluation, got {split!r}")
    if not 0 <= number < _SEEDS:
        raise ValueError(f"number must lie in 0 ... 2^31 - 1, got {number}")
    within = (seed_for("batches", seed) + number) % _SEEDS
    return torch.Generator().manual_seed(within + (_SEEDS if split == "evaluation" else 0))


def evaluation_batches(task: Task, rows: int, batch_size: int, *, seed: int, first: int = 0) -> list[Batch]:
    """Return batches of evaluation sequences, the same at each call; the last batch may be smaller than the others.

    Args:
        task: the task to draw from.
        rows: total number of sequences, 1 or more.
        batch_size: sequences per batch, 1 or more.
        seed: seed of the stream.
        first: number of the first batch in the stream.
    """
    size = min(batch_size, rows)
    return [
        task.batch(batch_generator("evaluation", seed, first + number), min(size, rows - number * size))
        for number in range(math.ceil(rows / size))
    ]


class TaskBatches(Dataset[Batch]):
    """A stream of `batches` batches, each generated on access.

    With a DataLoader, use `batch_size=None`. With transformers' Trainer, whose loader requires a batch size, use
    `per_device_train_batch_size=1`, `remove_unused_columns=False` and `data_collator=concatenate`. A loader with one
    worker (`dataloader_num_workers=1`) generates the next batch while the model processes the current one.
    """

    def __init__(self, task: Task, *, split: Split, seed: int, batch_size: int, batches: int) -> None:
        for name, value in (("batch_size", batch_size), ("batches", batches)):
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        batch_generator(split, seed, batches - 1)  # raises an error for an invalid split or number
        self.task = task
        self.split: Split = split
        self.seed, self.batch_size, self.batches = seed, batch_size, batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < self.batches:
            raise IndexError(f"number must lie in 0 ... {self.batches - 1}, got {number}")
        return self.task.batch(batch_generator(self.split, self.seed, number), self.batch_size)
