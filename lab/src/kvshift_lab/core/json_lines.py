"""JSON Lines files, with one record on each line, written completely or not at all.

The metrics of a run, the records of recipes and the rows of benchmarks all follow one policy:

- Lines are appended completely. If the disk takes only a part of them, that part is removed again and a RunFailedError
  names the file; earlier lines are unchanged.
- When `append` returns, its lines have been flushed to disk, unless `sync_seconds` allows to flush less often: then a
  power failure may lose that many seconds of work, but a killed process loses none.
- If several processes might write to a file, only one does at a time, under the lock of its folder
  (`RunFolder.locked`).
- A last line without a line end, left by a killed process, is not a record: `JSONLines.read` skips it, and
  `JSONLines.truncate_to` or the next `append` removes it.
- A file that changes anywhere but at its end is replaced as a whole (`write_lines`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from kvshift_lab.core.atomic import write_bytes
from kvshift_lab.core.errors import LabError, RunFailedError


class JSONLines:
    """A JSON Lines file, open for appending.

    Attributes:
        path: path of the file.
        is_device: whether the file is a device or a pipe, from which nothing is read.
        count: number of lines that were read and kept, or appended.
    """

    def __init__(
        self,
        path: Path,
        *,
        sync_seconds: float = 0.0,
        failure: str = "{path} could not be written: {error}; everything written before is kept",
        **dumps: Any,
    ) -> None:
        """Open the file without changing it.

        Args:
            path: path of the file, which is created if missing. A device or pipe, such as /dev/null, is not read.
            sync_seconds: minimum time between two flushes to disk; if infinite, only `sync` flushes.
            failure: message of an error, with the fields path, error and count.
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
        """Return the complete lines, without line ends."""
        self._file.seek(0)
        return self._file.read().split(b"\n")[:-1]

    def truncate_to(self, lines: Sequence[bytes]) -> None:
        """Truncate the file behind `lines`, the first of the lines that `read` has returned."""
        self.count, self._end = len(lines), sum(len(line) + 1 for line in lines)
        self._file.truncate(self._end)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each record, or none at all.

        Raises:
            RunFailedError: if the lines could not be written.
            ValueError: if a number is not finite, which JSON cannot represent.
        """
        lines = [json.dumps(record, **self._dumps).encode() + b"\n" for record in records]
        content = b"".join(lines)
        rest = memoryview(content)
        try:
            self._cut()
            while rest:  # an unbuffered file may write only a part
                rest = rest[self._file.write(rest) :]
            if time.monotonic() - self._synced >= self._sync_seconds:
                self.sync()
        except OSError as error:
            with suppress(OSError):  # the next call tries again
                self._cut()
            raise RunFailedError(self._failure.format(path=self.path, error=error, count=self.count)) from error
        self._end += len(content)
        self.count += len(lines)

    def sync(self) -> None:
        """Flush all lines to disk."""
        if not self.is_device:
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Close the file. No lines are buffered."""
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _cut(self) -> None:
        """Remove the remains of lines that could not be written completely."""
        if not self.is_device and self._file.seek(0, os.SEEK_END) > self._end:
            self._file.truncate(self._end)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON Lines file. Raise a LabError that names the file and line of an error."""
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
    """Replace all lines of a file atomically.

    Args:
        path: path of the file; its folder is created if missing.
        records: one record for each line.
        dumps: options of `json.dumps`, as in `JSONLines`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"ensure_ascii": False, "allow_nan": False, **dumps}
    write_bytes(path, "".join(json.dumps(record, **options) + "\n" for record in records).encode())
