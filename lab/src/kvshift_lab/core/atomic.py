"""Atomic writes: however the process ends, a file or folder is either complete or unchanged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvshift_lab.core.errors import LabError, RunFailedError


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically: however the process ends, the file is either complete or unchanged."""
    write_bytes(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise a LabError that names the file if it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise LabError(f"{path}: must contain a JSON object, got {type(values).__name__}")
    return values


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically, like `write_json`, with any content."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # the file system may be read-only
            part.unlink(missing_ok=True)
        raise RunFailedError(f"{path} could not be written: {error}; everything written before is kept") from error


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents, if it exists; if it is a symbolic link, remove only the link."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` if the block succeeds, and is removed if it fails.

    Raises:
        LabError: the folder cannot be made.
        RunFailedError: it could not take the place of `out`.
    """
    out = out.resolve()
    part = out.with_name(f".{out.name}.{os.getpid()}")  # beside `out`, so that a rename suffices
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise LabError(f"out: {out} cannot be created: {error}") from error
    try:
        yield part
        sync_folder(part)
        try:
            os.replace(part, out)
        except OSError as error:
            raise RunFailedError(f"out: {out} cannot be replaced: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
