"""Checkpoints that are whole or not there: a manifest, written last, names every file with its size and sha256."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshift.lab.core.atomic import remove_folder, sync_folder, write_json

_MANIFEST = "manifest.json"
_PREFIX = "checkpoint-"


def seal(folder: Path) -> None:
    """Declare the checkpoint in `folder` whole, once every byte of it is on the disk."""
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


def find_checkpoint(out: Path, say: Callable[[str], Any]) -> Path | None:
    """The newest whole checkpoint, every file of it checked; what is no whole one is said and set aside.

    A folder without manifest is one whose writing or removal was interrupted: it is removed, for what is missing from
    it is lost. One whose files are not what its manifest says is kept under another name, `checkpoint-N.corrupt`.
    """
    folders = list_checkpoints(out)
    whole = [folder for folder in folders if (folder / _MANIFEST).exists()]
    for folder in folders:
        if folder not in whole and _remove(folder, say):
            say(f"{folder.name} is incomplete (the process ended while it was written or removed): removed")
    for folder in reversed(whole):
        fault = _fault(folder, digests=True)
        if fault is None:
            return folder
        aside = _free_name(folder)
        try:
            folder.rename(aside)
        except OSError as error:
            say(f"{folder.name} is corrupt ({fault}): skipped; it could not be renamed: {error}")
        else:
            say(f"{folder.name} is corrupt ({fault}): skipped, kept as {aside.name}")
    return None


def keep_newest(newest: Path, count: int, say: Callable[[str], Any]) -> None:
    """Remove the checkpoints that are older than `newest`, which is whole, but the last `count` - 1 whole ones.

    What cannot be removed is said and left: an old checkpoint never costs a new one.
    """
    folders = list_checkpoints(newest.parent)
    folders = folders[: folders.index(newest)]
    whole = [folder for folder in folders if (folder / _MANIFEST).exists()]
    kept = whole[-(count - 1) :] if count > 1 else []
    for folder in folders:
        if folder not in kept:
            _remove(folder, say)


def list_checkpoints(out: Path) -> list[Path]:
    """The folders of checkpoints, whole or not, by step: the newest last."""
    found = [path for path in out.glob(f"{_PREFIX}*") if path.is_dir() or path.is_symlink()]
    numbered = [path for path in found if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def size_fault(folder: Path) -> str | None:
    """What is wrong with the manifest of a checkpoint or the sizes of its files, in a few words; None if nothing is."""
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
        # The sizes of all before the first digest: a cut file is the common fault, and seen at once.
        for name, expected in files.items() if digests else ():
            if _digest(folder / name) != expected["sha256"]:
                return f"the bytes of {name} have changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MANIFEST} or a file it names cannot be read: {error}"
    return None


def _remove(folder: Path, say: Callable[[str], Any]) -> bool:
    try:
        if not folder.is_symlink():
            (folder / _MANIFEST).unlink(missing_ok=True)  # first: half removed must not look whole
        remove_folder(folder)
    except OSError as error:
        say(f"{folder.name} is no longer needed, but could not be removed: {error}")
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
