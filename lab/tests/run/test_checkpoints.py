"""Checkpoints: which are complete, which are kept, and that an old one never costs a new one."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvshift_lab.core.errors import LabError
from kvshift_lab.run.checkpoints import find_checkpoint, remove_old_checkpoints
from kvshift_lab.run.train import train

from ..run_cases import copied, tiny


def checkpoint(out: Path, step: int, *, whole: bool = True) -> Path:
    folder = out / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "weights").write_text("1 2 3")
    if whole:
        (folder / "complete").touch()
    return folder


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("checkpoint-*"))


def test_the_newest_are_kept(tmp_path):
    for step in (8, 9, 10, 11):
        checkpoint(tmp_path, step)
    remove_old_checkpoints(tmp_path / "checkpoint-11", 2, pytest.fail)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-11"]
    remove_old_checkpoints(tmp_path / "checkpoint-11", 1, pytest.fail)
    assert names(tmp_path) == ["checkpoint-11"]


def test_an_old_checkpoint_that_cannot_be_removed_is_named_and_costs_nothing(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    remove, said = shutil.rmtree, []

    def busy(folder, *args, **kwargs):
        if folder.name == "checkpoint-1":
            raise OSError(16, "Device or resource busy")
        remove(folder, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", busy)
    remove_old_checkpoints(tmp_path / "checkpoint-3", 1, said.append)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert said == ["checkpoint-1 is no longer needed, but could not be removed: [Errno 16] Device or resource busy"]


def test_what_is_left_of_a_checkpoint_half_removed_goes(tmp_path):
    checkpoint(tmp_path, 1, whole=False)
    checkpoint(tmp_path, 2)
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda weights: weights.pop("model.norm.weight"), r"lacks 1 weights of the model, such as model\.norm"),
        (lambda weights: weights.update(a=torch.ones(3)), "has 1 weights that the model does not have, such as a"),
    ],
    ids=["missing", "unknown"],
)
def test_weights_that_are_not_those_of_the_model(edit, said, finished, corpus, tmp_path):
    """Trainer only warns, and goes on with initial weights."""
    out = copied(finished, tmp_path)
    file = find_checkpoint(out) / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(LabError, match=f"the checkpoint {said}"):
        train(tiny(corpus, out))
    assert not (out / "result.json").exists()
