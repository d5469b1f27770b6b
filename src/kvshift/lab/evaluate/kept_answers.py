"""A file of what models have answered, beside the report, from which an evaluation that was killed resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from kvshift.lab.core.errors import FolderInUseError, LabError, RunFailedError

__all__ = ["KeptAnswers", "kept_in", "key_of", "version_of"]


class KeptAnswers(Mapping[str, Any]):
    """Answers by key, each of which is on the disk before the next is asked for."""

    def __init__(self, file: BinaryIO | None = None) -> None:
        """Read what the file holds already.

        Args:
            file: JSON lines, "key" and "answer", open to read and to append. None: nothing outlives the process.
        """
        self._file = file
        self._answers: dict[str, Any] = {}
        if file is None:
            return
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                self._answers[record["key"]] = record["answer"]
            except (ValueError, KeyError, TypeError) as error:
                raise LabError(f"output: {file.name}:{number} was not written by this command") from error
        file.truncate(len(whole))  # of a line that was cut off, the beginning

    def add(self, key: str, answer: Any) -> None:
        self._answers[key] = answer
        if self._file is not None:
            try:
                self._file.write(json.dumps({"key": key, "answer": answer}).encode() + b"\n")
            except OSError as error:
                raise RunFailedError(f"output: writing to {self._file.name} failed: {error}") from error

    def __getitem__(self, key: str) -> Any:
        return self._answers[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)


@contextmanager
def kept_in(output: Path | None) -> Iterator[KeptAnswers]:
    """Those of NAME.answers.jsonl beside the report, held by one process at a time; new ones without a report."""
    if output is None:
        yield KeptAnswers()
        return
    path = output.with_name(f"{output.stem}.answers.jsonl")
    try:
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FolderInUseError(f"output: another process writes to {path}") from error
    with lock, path.open("ab+", buffering=0) as file:
        yield KeptAnswers(file)


def key_of(*asked: Any) -> str:
    """Of all that an answer depends on, the model and its version included."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


def version_of(source: str, model: Any) -> str:
    """A folder with the sizes and times of its files, or a name on the hub with its commit: other weights, another."""
    folder = Path(source)
    if not folder.is_dir():
        return f"{source} {getattr(model.config, '_commit_hash', None)}"
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return f"{folder.resolve()} {[(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]}"
