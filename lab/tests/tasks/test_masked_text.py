"""Masked text: which tokens are chosen, what replaces them, and that evaluation has other text than training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvshift_lab.core.errors import LabError
from kvshift_lab.tasks import MaskedTextConfig, MaskedTextTask, TaskBatches, WholeTask
from kvshift_lab.tasks.batch import IGNORED

CONFIG = MaskedTextConfig(vocab_size=300, length=32, validation_rows=64)


@pytest.fixture(scope="module")
def task() -> MaskedTextTask:
    return MaskedTextTask(CONFIG)


def test_labels_are_what_stood_there_one_column_later(task: MaskedTextTask) -> None:
    batch = TaskBatches(task, split="training", seed=0, batch_size=400, batches=2)[1]
    assert batch.input_ids.shape == batch.labels.shape == batch.slices.shape == (400, 32)
    labelled = batch.labels != IGNORED
    assert torch.equal(labelled, batch.slices == 0)
    assert not labelled[:, 0].any()
    original = batch.input_ids.clone()
    at = labelled.roll(-1, dims=1)
    original[at] = batch.labels[labelled]
    rows = {tuple(row) for row in task._train["input_ids"][:].tolist()}
    assert {tuple(row) for row in original.tolist()} <= rows


def test_as_much_is_chosen_and_replaced_as_in_bert(task: MaskedTextTask) -> None:
    """There are some 1,900 chosen positions, and each bound is four standard deviations."""
    batch = TaskBatches(task, split="training", seed=1, batch_size=400, batches=1)[0]
    chosen = batch.labels != IGNORED
    count = int(chosen.sum())
    assert abs(count / (400 * 31) - 0.15) < 4 * (0.15 * 0.85 / (400 * 31)) ** 0.5
    stands, stood = batch.input_ids.roll(1, dims=1)[chosen], batch.labels[chosen]
    masked, kept = stands == task.vocab_size - 1, stands == stood
    assert abs(masked.float().mean() - 0.8) < 4 * (0.8 * 0.2 / count) ** 0.5
    assert abs(kept.float().mean() - 0.1) < 4 * (0.1 * 0.9 / count) ** 0.5 + 0.01  # a random token may be the same
    assert not (~masked & ~kept & (stands == stood)).any()
    elsewhere = batch.input_ids[~chosen.roll(-1, dims=1)]
    assert (elsewhere != task.vocab_size - 1).all()


def test_evaluation_is_other_text_and_always_the_same(task: MaskedTextTask) -> None:
    assert isinstance(task, WholeTask)
    one, two = task.whole_table(), MaskedTextTask(CONFIG).whole_table()
    for name in ("input_ids", "labels", "slices"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    assert len(one.input_ids) == 64
    assert 0 < task.chance["masked"] < 0.5


def test_files_lie_in_the_folder_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wiki").mkdir()
    for name, text in (("train", "the quick brown fox jumps over " * 90), ("valid", "a lazy dog sleeps " * 90)):
        (tmp_path / "wiki" / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    config = replace(CONFIG, corpus="wiki/train.jsonl", validation="wiki/valid.jsonl")
    monkeypatch.setenv("KVSHIFT_SHARED_DATA", str(tmp_path))
    found = MaskedTextTask(config)
    assert found.vocab_size <= 301
    monkeypatch.delenv("KVSHIFT_SHARED_DATA")
    with pytest.raises(LabError, match="KVSHIFT_SHARED_DATA must name the folder that contains wiki/train"):
        MaskedTextTask(config)
