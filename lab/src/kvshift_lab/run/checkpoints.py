"""Complete checkpoints: an empty file, written last, marks a checkpoint from which a run can resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshift_lab.core.atomic import remove_folder

_COMPLETE = "complete"
_PREFIX = "checkpoint-"


def mark_complete(folder: Path) -> None:
    """Mark the checkpoint in `folder` as complete."""
    (folder / _COMPLETE).touch()


def find_checkpoint(out: Path) -> Path | None:
    """Return the newest complete checkpoint, or None, and remove those that a killed process left incomplete."""
    folders = list_checkpoints(out)
    complete = [folder for folder in folders if is_complete(folder)]
    for folder in folders:
        if folder not in complete:
            shutil.rmtree(folder, ignore_errors=True)
    return complete[-1] if complete else None


def remove_old_checkpoints(newest: Path, count: int, log: Callable[[str], Any]) -> None:
    """Remove all checkpoints older than `newest`, a complete one, except the last `count` - 1.

    A folder that cannot be removed is reported and left, so that an old checkpoint never makes the run fail.
    """
    older = [folder for folder in list_checkpoints(newest.parent) if _step(folder) < _step(newest)]
    for folder in older[: len(older) - (count - 1)]:
        try:
            (folder / _COMPLETE).unlink(missing_ok=True)  # first, so that the rest counts as incomplete
            remove_folder(folder)
        except OSError as error:
            log(f"{folder.name} is no longer needed, but could not be removed: {error}")


def list_checkpoints(out: Path) -> list[Path]:
    """Return the folders of all checkpoints, complete or not, in order of their steps."""
    found = [path for path in out.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal() and path.is_dir()]
    return sorted(found, key=_step)


def is_complete(folder: Path) -> bool:
    """Return True if the checkpoint was written to its end."""
    return (folder / _COMPLETE).exists()


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))
