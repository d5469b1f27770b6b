"""Answers of models, saved in a file beside the report, from which an interrupted evaluation resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.json_lines import JSONLines, open_locked


class AnswerCache(dict[str, Any]):
    """A dict of answers by key that writes each answer to its file as soon as it is added."""

    def __init__(self, file: JSONLines | None = None) -> None:
        """Read the answers that the file already contains.

        Args:
            file: JSON lines with "key" and "answer". None: keep the answers in memory only.
        """
        super().__init__()
        self._file = file
        if file is None:
            return
        lines = file.read()
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                self[record["key"]] = record["answer"]
            except (ValueError, KeyError, TypeError) as error:
                raise LabError(f"output: {file.path}:{number} was not written by this command") from error
        file.truncate_to(lines)

    def add(self, key: str, answer: Any) -> None:
        if self._file is not None:
            self._file.append([{"key": key, "answer": answer}])
        self[key] = answer


@contextmanager
def open_answer_cache(output: Path | None) -> Iterator[AnswerCache]:
    """Open NAME.answers.jsonl beside the report, locked for this process; without a report, keep answers in memory."""
    if output is None:
        yield AnswerCache()
        return
    path = output.with_name(f"{output.stem}.answers.jsonl")
    failure = "output: writing to {path} failed: {error}; its {count} lines are complete"
    # Answers may arrive faster than a disk can sync. A log-likelihood may be minus infinity.
    with open_locked(path, "output", sync_seconds=1, failure=failure, ensure_ascii=True, allow_nan=True) as file:
        yield AnswerCache(file)


def answer_key(*parts: Any) -> str:
    """Hash everything that an answer depends on, including the model and its version."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
