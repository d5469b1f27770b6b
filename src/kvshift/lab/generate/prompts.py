"""Prompts from a file, and their continuations into one, a line each, so that a stopped process can be continued."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from filelock import FileLock, Timeout

from kvshift.lab.core.errors import FolderInUseError, LabError, RunFailedError, require_unicode

__all__ = ["Answers", "Prompt", "answers_in", "read_prompts"]


class Prompt(NamedTuple):
    """A text to continue, and what messages call it: "prompt", or "prompts.txt:3"."""

    text: str
    name: str = "prompt"


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: each line of a .txt, or the field "prompt" of each line of a .jsonl.

    Blank lines are left out, and a byte order mark, as they are of the text that models are trained on.

    Raises:
        LabError: the file cannot be read, is of another kind, or holds no prompt; a bad line is named, `file:line`.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise LabError(f"prompts must be a .txt (a prompt a line) or .jsonl (field prompt) file, got {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"prompts: {path} cannot be read: {error}") from error
    prompts = [Prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise LabError(f"prompts: {path} is empty")
    return prompts if path.suffix == ".txt" else [_prompt_of(*prompt) for prompt in prompts]


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LabError(f"{where}: no JSON: {error}") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise LabError(f'{where}: expected an object with a string "prompt", got {line[:80]}')
    require_unicode(prompt, where)
    return Prompt(prompt, where)


class Answers:
    """The lines of an output file, in the order of the prompts, `samples` for each.

    Attributes:
        done: how many lines there are.
    """

    def __init__(self, path: Path, file: BinaryIO, done: int) -> None:
        self._path = path
        self._file = file
        self.done = done

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Write records that are on the disk, all of them, when this returns."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        end = self._file.tell()
        try:
            _write(self._file, "".join(lines).encode())
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # what stays of a line that was cut off is left out when the command resumes
                self._file.truncate(end)
            raise RunFailedError(
                f"output: writing to {self._path} failed: {error}; its {self.done} lines are whole, and the same "
                "command resumes after them"
            ) from error
        self.done += len(lines)


class _Device(Answers):
    """Where nothing is read back, such as /dev/null or a pipe: nothing to resume, no disk to wait for."""

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            try:
                _write(self._file, (json.dumps(record, ensure_ascii=False) + "\n").encode())
            except OSError as error:
                raise RunFailedError(f"output: writing to {self._path} failed: {error}") from error
            self.done += 1


def _write(file: BinaryIO, content: bytes) -> None:
    """All of `content`: a file without buffer takes as much as there is room for on the disk, and says how much."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


@contextmanager
def answers_in(path: Path, prompts: Sequence[str], samples: int, settings: str) -> Iterator[Answers]:
    """Open an output file behind the last whole line that an earlier process wrote to it.

    Args:
        path: made where it is missing, its folders too. What is no regular file, such as /dev/null, is written to
            from the first line on.
        prompts: those of this run; the lines that are there must belong to the first of them.
        samples: lines for each prompt.
        settings: the "settings" that each line must name, so that no file mixes two models or two temperatures.

    Raises:
        LabError: the file cannot be opened, holds other lines, or another process writes to it.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with _opened(path, "wb") as file:
            yield _Device(path, file, 0)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"output: {path} cannot be written: {error}") from error
    new = not path.exists()
    # In this order, so that no lock is left beside what cannot be opened:
    with (
        _opened(path, "ab+") as file,
        _locked(path, new),
    ):
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.split(b"\n")[:-1]
        for number, line in enumerate(lines):
            _check_line(line, f"{path}:{number + 1}", prompts, number, samples, settings)
        file.truncate(len(whole))  # of a line that was cut off, the beginning
        file.seek(0, os.SEEK_END)
        yield Answers(path, file, len(lines))


@contextmanager
def _locked(path: Path, new: bool) -> Iterator[None]:
    try:
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FolderInUseError(f"output: another process writes to {path}") from error
    except OSError as error:  # such as a name that is too long with ".lock" behind it
        if new:
            path.unlink()
        raise LabError(f"output: {path} cannot be written: {error}") from error
    with lock:
        yield


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[BinaryIO]:
    try:
        file = cast(BinaryIO, path.open(mode, buffering=0))
    except OSError as error:
        raise LabError(f"output: {path} cannot be written: {error}") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # nothing waits in a buffer, and what `append` has written is on the disk
            file.close()


def _check_line(line: bytes, where: str, prompts: Sequence[str], number: int, samples: int, settings: str) -> None:
    advice = "choose another output, or remove this one"
    try:
        record = json.loads(line)
        found = (record["index"], record["sample"], record["prompt"])
        written_by = record["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"output: {where} was not written by this command; {advice}") from error
    index, sample = divmod(number, samples)
    if index >= len(prompts) or found != (index, sample, prompts[index]):
        raise LabError(f"output: {where} belongs to other prompts; {advice}")
    if written_by != settings:
        raise LabError(f"output: {where} was made by another model or with other options; {advice}")
