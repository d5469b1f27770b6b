"""Files and folders that are there whole or, however the process ends, as they were before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvshift.lab.core.errors import LabError, RunFailedError


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file that is there whole or, however the process ends, not at all."""
    write_bytes(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The JSON in a file; raises LabError that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: cannot be read: {error}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_json`, for any content."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # of a file system that cannot be written to
            part.unlink(missing_ok=True)
        raise RunFailedError(f"{path} could not be written: {error}; what was written before is kept") from error


def remove_folder(path: Path) -> None:
    """Remove a folder and what is in it, where there is one; of a symbolic link, only the link."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which then is `out`: there whole or, however the block ends, not at all.

    Raises:
        LabError: it cannot be made.
    """
    part = out.with_name(f".{out.name}.{os.getpid()}")  # beside its place, so that a rename puts it there
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise LabError(f"out: {out} cannot be made: {error}") from error
    try:
        yield part
        sync_folder(part)
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk itself."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
