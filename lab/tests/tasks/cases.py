"""Small tasks for tests, checks for every batch, and the sequences that docstrings draw."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from kvshift_lab.tasks import (
    CFG3S,
    Batch,
    CFGConfig,
    CFGTask,
    HopConfig,
    HopTask,
    IGSMConfig,
    IGSMTask,
    InductionConfig,
    InductionTask,
    MQARConfig,
    MQARTask,
    NGramConfig,
    NGramTask,
    Task,
)

TASKS: dict[str, Any] = {
    "script": InductionTask(InductionConfig(length=29, vocab_size=101)),
    "latest": InductionTask(InductionConfig(mode="latest", length=29, vocab_size=101)),
    "raw": InductionTask(InductionConfig(mode="raw", length=29, vocab_size=101)),
    "single": InductionTask(InductionConfig(mode="single", length=29, vocab_size=101)),
    "repeats": InductionTask(InductionConfig(length=29, vocab_size=101, loss="repeats")),
    "mqar": MQARTask(MQARConfig(length=30, pairs=3, vocab_size=101)),
    "mqar random": MQARTask(MQARConfig(length=30, pairs=3, vocab_size=101, filler="random")),
    "cfg": CFGTask(CFGConfig(grammar=CFG3S, length=29, prefix=5)),
    "hop": HopTask(HopConfig(letters=29)),
    "ngram": NGramTask(NGramConfig(length=30)),
    "kamino": IGSMTask(IGSMConfig(ops=4, test_ops=5, length=211, loss="solutions")),
    "igsm": IGSMTask(IGSMConfig(ops=4, test_ops=5, length=307, generator="igsm")),
}


def drawn(module: ModuleType, name: str) -> list[list[str]]:
    """Return the lines of a module's docstring that begin with `name`, as words; three spaces begin a remark."""
    lines = [line.strip() for line in (module.__doc__ or "").splitlines()]
    rows = [line[len(name) :].strip().split("   ")[0].split() for line in lines if line.startswith(name + "  ")]
    assert rows, f"the docstring of {module.__name__} draws no {name}"
    return rows


def drawn_numbers(module: ModuleType, name: str) -> list[list[int]]:
    """Return the lines of `drawn` as numbers, with - for -100 and . for -1."""
    return [[{"-": -100, ".": -1}.get(word) or int(word) for word in row] for row in drawn(module, name)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_shape(task: Task, batch: Batch, rows: int) -> None:
    """Check what every batch of every task must satisfy."""
    for tensor in (batch.input_ids, batch.labels, batch.slices):
        assert tensor.shape == (rows, task.length)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert batch.input_ids.min() >= 0
    assert batch.input_ids.max() < task.vocab_size
    labelled = batch.labels != -100
    assert not labelled[:, 0].any()
    assert labelled.any(dim=1).all()
    assert batch.labels[labelled].min() >= 0
    assert batch.labels[labelled].max() < task.vocab_size
    in_slice = batch.slices != -1
    assert batch.slices[in_slice].min() >= 0
    assert batch.slices[in_slice].max() < len(task.slice_names)
    assert not (in_slice & ~labelled).any()
    assert in_slice.any(dim=1).all()
    assert set(task.chance) <= set(task.slice_names)
