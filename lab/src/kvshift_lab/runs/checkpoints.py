"""Complete checkpoints: a manifest, written last, lists every file of a checkpoint with its size and sha256."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshift_lab.core.atomic import remove_folder, sync_folder, write_json

_MANIFEST = "manifest.json"
_PREFIX = "checkpoint-"


def mark_complete(folder: Path) -> None:
    """Flush all files of the checkpoint in `folder` to disk, then mark it as complete by writing its manifest."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = {
                "size": path.stat().st_size,
                "sha256": _digest(path, sync=True),
            }
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        sync_folder(inner)
    write_json(folder / _MANIFEST, {"files": files})
    sync_folder(folder.parent)


def find_checkpoint(out: Path, log: Callable[[str], Any]) -> Path | None:
    """Return the newest complete checkpoint, with every file verified, or None; report and set aside damaged ones.

    A folder without a manifest was only partly written or removed when the process ended. It is removed, because the
    missing files are lost. A newer folder whose files do not match its manifest is renamed to `checkpoint-N.corrupt`.
    """
    folders = list_checkpoints(out)
    whole = [folder for folder in folders if (folder / _MANIFEST).exists()]
    for folder in folders:
        if folder not in whole and _remove(folder, log):
            log(f"{folder.name} is incomplete (the process ended while it was written or removed): removed")
    for folder in reversed(whole):
        fault = _fault(folder, digests=True)
        if fault is None:
            return folder
        aside = _free_name(folder)
        try:
            folder.rename(aside)
        except OSError as error:
            log(f"{folder.name} is corrupt ({fault}): skipped; it could not be renamed: {error}")
        else:
            log(f"{folder.name} is corrupt ({fault}): skipped, kept as {aside.name}")
    return None


def remove_old_checkpoints(newest: Path, count: int, log: Callable[[str], Any]) -> None:
    """Remove checkpoints older than `newest`, a complete one, except the last `count` - 1 that are complete.

    A folder that cannot be removed is reported and left, so that an old checkpoint never makes the run fail.
    """
    folders = list_checkpoints(newest.parent)
    folders = folders[: folders.index(newest)]
    whole = [folder for folder in folders if (folder / _MANIFEST).exists()]
    kept = whole[-(count - 1) :] if count > 1 else []
    for folder in folders:
        if folder not in kept:
            _remove(folder, log)


def list_checkpoints(out: Path) -> list[Path]:
    """Return the folders of all checkpoints, complete or not, in order of their steps."""
    found = [path for path in out.glob(f"{_PREFIX}*") if path.is_dir() or path.is_symlink()]
    numbered = [path for path in found if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def size_fault(folder: Path) -> str | None:
    """Return a short description of a problem with a checkpoint's manifest or file sizes, or None if there is none."""
    return _fault(folder, digests=False)


def _fault(folder: Path, *, digests: bool) -> str | None:
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        for name, expected in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["size"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
        # Sizes are checked before digests: truncated files are the most common problem, and are found at once.
        for name, expected in files.items() if digests else ():
            if _digest(folder / name) != expected["sha256"]:
                return f"the content of {name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MANIFEST} or a file it names cannot be read: {error}"
    return None


def _remove(folder: Path, log: Callable[[str], Any]) -> bool:
    try:
        if not folder.is_symlink():
            (folder / _MANIFEST).unlink(missing_ok=True)  # first, so that the rest counts as incomplete
        remove_folder(folder)
    except OSError as error:
        log(f"{folder.name} is no longer needed, but could not be removed: {error}")
        return False
    return True


def _digest(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest


def _free_name(folder: Path) -> Path:
    name = folder.with_name(f"{folder.name}.corrupt")
    number = 1
    while name.exists():
        number += 1
        name = folder.with_name(f"{folder.name}.corrupt-{number}")
    return name
