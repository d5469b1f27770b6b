"""Files of JSON lines, a record a line: each is there whole, or not at all.

There is one policy for the metrics of a run, the records of recipes, the rows of benchmarks, generated continuations
and answers to benchmarks:

- Lines are appended whole. If the disk takes only a part of them, or none, that part is cut off again and a
  RunFailedError names the file; the lines before it stay as they are.
- When `append` returns, its lines are on the disk itself. A file whose lines are cheaper to lose than to wait for has
  `sync_seconds`: so many seconds of work may be lost in a power failure, and none if only the process is killed.
- Where several processes might write to a file, one at a time does: under the lock of its folder (`RunFolder.locked`),
  or under one of its own (`open_locked`).
- A last line without an end, left by a process that was killed, is not a record: `JSONLines.read` leaves it out, and
  `JSONLines.keep` or the next `append` cuts it off.
- A file that changes otherwise than at its end is replaced as a whole (`write_lines`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from filelock import FileLock, Timeout

from kvshift.lab.core.atomic import write_bytes
from kvshift.lab.core.errors import FolderInUseError, LabError, RunFailedError


class JSONLines:
    """A file of JSON lines, open for appending.

    Attributes:
        path: of the file.
        is_device: whether it is a device or a pipe, from which nothing is read.
        count: lines that were read and kept, or appended.
    """

    def __init__(
        self,
        path: Path,
        *,
        sync_seconds: float = 0.0,
        failure: str = "{path} could not be written: {error}; what was written before is kept",
        **dumps: Any,
    ) -> None:
        """Open the file; nothing is changed yet.

        Args:
            path: created if missing. Nothing is read back from a device or a pipe, such as /dev/null.
            sync_seconds: least time between two waits for the disk; infinite: only `sync` waits.
            failure: the message of an error, with the fields path, error and count.
            dumps: options of `json.dumps` besides ensure_ascii=False and allow_nan=False.
        """
        self.path, self._sync_seconds, self._failure = path, sync_seconds, failure
        self._dumps = {"ensure_ascii": False, "allow_nan": False, **dumps}
        self.is_device = path.exists() and not (path.is_file() or path.is_dir())
        self._file = cast(BinaryIO, path.open("wb" if self.is_device else "ab+", buffering=0))
        self._end = 0 if self.is_device else self._file.seek(0, os.SEEK_END)
        self._synced = time.monotonic()
        self.count = 0

    def read(self) -> list[bytes]:
        """The lines that are whole, without their ends."""
        self._file.seek(0)
        return self._file.read().split(b"\n")[:-1]

    def keep(self, lines: Sequence[bytes]) -> None:
        """Cut off what lies behind `lines`, the first that `read` has returned."""
        self.count, self._end = len(lines), sum(len(line) + 1 for line in lines)
        self._file.truncate(self._end)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each record, or none.

        Raises:
            RunFailedError: they could not be written.
            ValueError: JSON cannot hold a number that is not finite.
        """
        lines = [json.dumps(record, **self._dumps).encode() + b"\n" for record in records]
        content = b"".join(lines)
        rest = memoryview(content)
        try:
            self._cut()
            while rest:  # without a buffer, a file takes as much as there is room for
                rest = rest[self._file.write(rest) :]
            if time.monotonic() - self._synced >= self._sync_seconds:
                self.sync()
        except OSError as error:
            with suppress(OSError):  # then the next call does it
                self._cut()
            raise RunFailedError(self._failure.format(path=self.path, error=error, count=self.count)) from error
        self._end += len(content)
        self.count += len(lines)

    def sync(self) -> None:
        """Have all lines on the disk itself."""
        if not self.is_device:
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Close the file; no line waits in a buffer for this."""
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _cut(self) -> None:
        """Remove what was left of a line that could not be written."""
        if not self.is_device and self._file.seek(0, os.SEEK_END) > self._end:
            self._file.truncate(self._end)


@contextmanager
def open_locked(path: Path, option: str, **options: Any) -> Iterator[JSONLines]:
    """A file of JSON lines that no other process opens like this at the same time; a device needs no lock.

    Args:
        path: created if missing.
        option: the name that errors give it.
        options: of `JSONLines`.

    Raises:
        FolderInUseError: another process has it open.
        LabError: it cannot be opened; nothing is left beside it.
    """
    new = not path.exists()
    try:
        file = JSONLines(path, **options)
    except OSError as error:
        raise LabError(f"{option}: {path} cannot be written: {error}") from error
    with file:
        if file.is_device:
            yield file
            return
        try:
            lock = FileLock(path.with_name(f".{path.name}.lock"))
            lock.acquire(timeout=0)
        except Timeout as error:
            raise FolderInUseError(f"{option}: another process writes to {path}") from error
        except OSError as error:  # such as a name that is too long with ".lock" behind it
            if new:
                path.unlink()
            raise LabError(f"{option}: {path} cannot be written: {error}") from error
        with lock:
            yield file


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines; raises LabError that names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise LabError(f"{path}:{number}: not a line of JSON: {error}") from error


def write_lines(path: Path, records: Iterable[Mapping[str, Any]], **dumps: Any) -> None:
    """Write all lines again; the file is whole or as it was.

    Args:
        path: its folder is created if missing.
        records: a line each.
        dumps: as in `JSONLines`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"ensure_ascii": False, "allow_nan": False, **dumps}
    write_bytes(path, "".join(json.dumps(record, **options) + "\n" for record in records).encode())
