"""The folder of a run: its files, its lock, and its metrics.

OUT/config.json        options, with all defaults resolved, and facts about the data, which are checked on resuming
OUT/environment.json   commit, versions, hardware, command line and start time, also of each resumption
OUT/tokenizer/         the tokenizer
OUT/metrics.jsonl      one JSON object per line
OUT/checkpoint-N/      the state from which a run resumes (`checkpoints.py`)
OUT/tensorboard/       event files, if this tracker is enabled
OUT/wandb/             files of Weights & Biases, if this tracker is enabled
OUT/model/             the final model and its tokenizer
OUT/result.json        the final results, written last: without this file the run is not finished
OUT/.lock              lock file, locked while a process trains in this folder
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvshift_lab.core.atomic import read_json, remove_folder, write_bytes
from kvshift_lab.core.errors import FolderInUseError, LabError
from kvshift_lab.core.json_lines import JSONLines

LEFTOVERS = (".tokenizer-????????", ".model.part", ".model.former", ".*.json.part", ".*.jsonl.part")
"""Patterns of the names of incomplete files and folders that a killed process may leave."""


class RunFolder:
    """The paths of one run's files, and the folder's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.environment = path / "environment.json"
        self.tokenizer = path / "tokenizer"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb"
        self.model = path / "model"
        self.result = path / "result.json"

    @contextmanager
    def locked(self, *early: Path) -> Iterator[None]:
        """Create the folder and hold its lock, which is released however the process ends.

        If the block raises a LabError for invalid input (exit code 2) before a run has begun, restore the folder's
        previous state.

        Args:
            early: files that the block may write before the run begins, besides the tokenizer and the environment.
        """
        new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            existing = {*self.path.iterdir()} if self.path.is_dir() else set[Path]()
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
        except LabError as error:
            if error.exit_code == LabError.exit_code and not self.config.exists():
                self._restore_folder(new_folders, existing, early)
            raise
        finally:
            lock.release()

    def _restore_folder(self, new_folders: list[Path], existing: set[Path], early: tuple[Path, ...]) -> None:
        """Remove paths not in `existing`, then `new_folders`, unless there are files of a run that has begun."""
        lock = self.path / ".lock"
        new = {*self.path.iterdir()} - existing
        if not new <= {self.tokenizer, self.environment, lock, *early}:
            return
        with suppress(OSError):
            for path in new:
                remove_folder(path) if path.is_dir() else path.unlink()
            for folder in new_folders:
                folder.rmdir()

    def read(self, path: Path) -> dict[str, Any] | None:
        """Return the JSON object in a file, or None if the file does not exist."""
        try:
            return read_json(path)
        except LabError as error:
            if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                return None
            raise LabError(f"{error}; fix it, or choose another folder for out") from error

    def clean(self) -> None:
        """Remove incomplete files left by a process that was killed."""
        for pattern in LEFTOVERS:
            for path in self.path.glob(pattern):
                if path.is_file():
                    path.unlink()
                else:
                    remove_folder(path)


class Metrics(JSONLines):
    """The file metrics.jsonl, open for appending. It is synced to disk with each checkpoint."""

    def __init__(self, path: Path, *, up_to_step: int, log: Callable[[str], Any]) -> None:
        """Open the file and drop the lines after `up_to_step`, which an interrupted run may have left.

        Damaged lines before these are also dropped, and each is reported with `log`.
        """
        lines = [(line, *_record(line)) for line in _lines(path)]
        until = [number for number, (_, record, _) in enumerate(lines) if record and record["step"] <= up_to_step]
        kept = []
        for number, (line, record, problem) in enumerate(lines[: until[-1] + 1] if until else [], start=1):
            if record is None:
                log(f"{path}: line {number} is damaged ({problem}); only this line is left out")
            else:
                kept.append(line + b"\n")
        write_bytes(path, b"".join(kept))
        self.seconds = max((line["seconds"] for line in read_metrics(path, "train")), default=0.0)
        super().__init__(path, sync_seconds=math.inf, ensure_ascii=True)

    def write(self, **values: Any) -> None:
        """Append one record."""
        self.append([values])


def read_metrics(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind, in order. The last line of the file may be incomplete, and is then ignored.

    Raises:
        LabError: any other line is not a valid record.
    """
    records = list(map(_record, _lines(path)))
    for number, (record, problem) in enumerate(records[:-1], start=1):
        if record is None:
            raise LabError(f"{path}: line {number} is damaged ({problem}); remove or fix it")
    return [record for record, _ in records if record and record["kind"] == kind]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def _record(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return the record in a line of metrics, or None and a description of what is wrong with the line."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        return None, "not a JSON object"
    expected: dict[str, Any] = {"kind": str, "step": int}
    if record.get("kind") == "train":
        expected["seconds"] = int | float
    wrong = [name for name, kind in expected.items() if not isinstance(record.get(name), kind)]
    return (None, f"no valid {' and '.join(wrong)}") if wrong else (record, "")
