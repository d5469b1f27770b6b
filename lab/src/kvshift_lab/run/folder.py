"""The folder of a run: its files, its lock, and its metrics.

OUT/config.json        options, with all defaults resolved, and facts about the data, which are checked on resuming
OUT/environment.json   commit, versions, hardware, command line and start time, also of each resumption
OUT/tokenizer/         the tokenizer
OUT/metrics.jsonl      one JSON object per line
OUT/checkpoint-N/      the state from which a run resumes (`checkpoints.py`)
OUT/tensorboard/       event files, if this tracker is enabled
OUT/model/             the final model and its tokenizer
OUT/result.json        the final results, written last: without this file the run is not finished
OUT/.lock              lock file, locked while a process trains in this folder
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvshift_lab.core.atomic import read_json
from kvshift_lab.core.errors import FolderInUseError, LabError
from kvshift_lab.core.json_lines import write_lines


class RunFolder:
    """The paths of one run's files, and the folder's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.environment = path / "environment.json"
        self.tokenizer = path / "tokenizer"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.result = path / "result.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and hold its lock, which is released however the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise FolderInUseError(
                f"out: {self.path} is in use by another process; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            raise LabError(f"out: {self.path} cannot be written to: {error}") from error
        try:
            yield
        finally:
            lock.release()

    def read(self, path: Path) -> dict[str, Any] | None:
        """Return the JSON object in a file, or None if the file does not exist."""
        return read_json(path) if path.exists() else None


class Metrics:
    """The file metrics.jsonl, open for appending. It is synced to disk with each checkpoint.

    Attributes:
        seconds: training time until the last line, in seconds.
    """

    def __init__(self, path: Path, *, up_to_step: int) -> None:
        """Open the file and drop the lines after `up_to_step`, which an interrupted run may have left."""
        kept = [record for record in _records(path) if record["step"] <= up_to_step]
        write_lines(path, kept)
        self.seconds = max((record["seconds"] for record in kept if record["kind"] == "train"), default=0.0)
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append one record."""
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush all lines to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; an error in writing has been raised by `write`."""
        with suppress(OSError):
            self._file.close()


def read_metrics(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind, in order."""
    return [record for record in _records(path) if record["kind"] == kind]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records up to the first incomplete line, which a killed process or a full disk may have left."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            return
