"""Checkpoints: which are complete, which are kept, and that an old one never costs a new one."""

import re
import shutil
from pathlib import Path

import pytest

from kvshift_lab.runs.checkpoints import find_checkpoint, remove_old_checkpoints
from kvshift_lab.training.train import train

from ..run_cases import assert_same_run, copied, tiny


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: truncate(folder / "model.safetensors"), "model.safetensors has .* bytes instead of"),
        (lambda folder: flip(folder / "optimizer.pt"), "the content of optimizer.pt has changed"),
        (lambda folder: (folder / "rng_state.pth").unlink(), "rng_state.pth is missing"),
        (lambda folder: truncate(folder / "manifest.json"), "manifest.json .* cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json .* cannot be read"),
    ],
    ids=["truncated", "flipped bit", "missing file", "cut manifest", "strange manifest"],
)
def test_corrupt_checkpoint_is_named_and_skipped(finished, tmp_path, spoil, said):
    out, notes = copied(finished, tmp_path), []
    spoil(out / "checkpoint-12")
    assert find_checkpoint(out, notes.append) == out / "checkpoint-8"
    (note,) = notes
    assert re.search(rf"checkpoint-12 is corrupt \({said}.*kept as checkpoint-12.corrupt", note)
    assert (out / "checkpoint-12.corrupt").is_dir()


def test_all_checkpoints_corrupt(finished, corpus, tmp_path, capfd):
    out = copied(finished, tmp_path)
    flip(out / "checkpoint-8" / "model.safetensors")
    (out / "checkpoint-12" / "manifest.json").unlink()
    train(tiny(corpus, out))
    err = capfd.readouterr().err
    assert "checkpoint-12 is incomplete" in err
    assert "checkpoint-8 is corrupt" in err
    assert "starting from the beginning" in err
    assert_same_run(out, finished)


def test_a_second_corrupt_checkpoint_of_one_step_finds_a_name(tmp_path):
    for number in range(3):
        folder = tmp_path / "checkpoint-5"
        folder.mkdir()
        (folder / "manifest.json").write_text(f"no json {number}")
        assert find_checkpoint(tmp_path, lambda text: None) is None
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-5.corrupt", "checkpoint-5.corrupt-2", "checkpoint-5.corrupt-3"]
    assert (tmp_path / names[0] / "manifest.json").read_text() == "no json 0"


def checkpoint(out: Path, step: int, *, whole: bool = True) -> Path:
    folder = out / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "weights").write_text("1 2 3")
    if whole:
        (folder / "manifest.json").write_text('{"files": {}}')
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
    assert find_checkpoint(tmp_path, said.append) == tmp_path / "checkpoint-3"


def test_of_an_old_checkpoint_that_is_a_link_the_link_is_removed(tmp_path):
    """Its target does not belong to the run."""
    checkpoint(tmp_path, 1).rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "elsewhere")
    checkpoint(tmp_path, 2)
    remove_old_checkpoints(tmp_path / "checkpoint-2", 1, pytest.fail)
    assert names(tmp_path) == ["checkpoint-2"]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_a_later_checkpoint_is_not_taken_for_the_newest(tmp_path):
    """The later checkpoint is corrupt, could not be renamed, and lies beyond the step that the run went back to."""
    for step in (4, 8, 12):
        checkpoint(tmp_path, step)
    remove_old_checkpoints(tmp_path / "checkpoint-8", 1, pytest.fail)
    assert names(tmp_path) == ["checkpoint-12", "checkpoint-8"]


def test_what_is_left_of_a_checkpoint_half_removed_goes(tmp_path):
    checkpoint(tmp_path, 1, whole=False)
    checkpoint(tmp_path, 2)
    said = []
    assert find_checkpoint(tmp_path, said.append) == tmp_path / "checkpoint-2"
    assert said == ["checkpoint-1 is incomplete (the process ended while it was written or removed): removed"]
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_corrupt_checkpoint_that_cannot_be_renamed_is_skipped(tmp_path, monkeypatch):
    checkpoint(tmp_path, 1)
    (checkpoint(tmp_path, 2) / "manifest.json").write_text("[]")

    def busy(*args):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", busy)
    said = []
    assert find_checkpoint(tmp_path, said.append) == tmp_path / "checkpoint-1"
    assert re.match(r"checkpoint-2 is corrupt .*: skipped; it could not be renamed: .* busy", said[0])


def test_a_model_that_stands_is_not_removed_before_the_next(finished, corpus, tmp_path, monkeypatch):
    """Just before the new model replaces the old one, both are complete on the disk."""
    out = copied(finished, tmp_path)
    rename, seen = Path.rename, []

    def watched(path, target):
        if path.name == ".model.part":
            seen.append((path / "model.safetensors").exists())
            seen.append((out / ".model.former" / "model.safetensors").exists())
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    train(tiny(corpus, out))
    assert seen == [True, True]
    assert not list(out.glob(".model*"))
    assert_same_run(out, finished)
