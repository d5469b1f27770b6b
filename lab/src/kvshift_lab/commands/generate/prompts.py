"""Reading prompts from a file, and writing their continuations to one from which an interrupted command resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvshift_lab.core.errors import LabError, require_unicode
from kvshift_lab.core.json_lines import JSONLines, open_locked


class Prompt(NamedTuple):
    """A text to continue, and its name in messages, such as "prompt" or "prompts.txt:3"."""

    text: str
    name: str = "prompt"


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts in a file: the lines of a .txt file, or the field "prompt" of each line of a .jsonl file.

    Blank lines and a byte order mark are skipped, as in training text.

    Raises:
        LabError: the file cannot be read, is of another type, or contains no prompt, or a line is invalid; the message
            then names it as `file:line`.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise LabError(f"prompts must be a .txt file (one prompt per line) or a .jsonl file (field prompt), got {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"prompts: {path} cannot be read: {error}") from error
    prompts = [Prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise LabError(f"prompts: {path} is empty")
    return prompts if path.suffix == ".txt" else [_parse_prompt(*prompt) for prompt in prompts]


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LabError(f"{where}: not JSON: {error}") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise LabError(f'{where}: expected an object with a string "prompt", got {line[:80]}')
    require_unicode(prompt, where)
    return Prompt(prompt, where)


@contextmanager
def open_output(path: Path, prompts: Sequence[str], samples: int, settings: str) -> Iterator[JSONLines]:
    """Open an output file to append after the last complete line that an earlier process wrote to it.

    Args:
        path: path of the file, which is created if missing, with its folders. A device or a pipe, such as
            /dev/null, receives all lines, from the first.
        prompts: all prompts. Existing lines must belong to the first of them.
        samples: number of lines for each prompt.
        settings: required value of "settings" in existing lines, so that a file never mixes models or options.

    Raises:
        LabError: the file cannot be opened, contains other lines, or is in use by another process.
    """
    failure = "output: writing to {path} failed: {error}"
    if not path.exists() or path.is_file():
        failure += "; its {count} lines are complete, and the same command resumes after them"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"output: {path} cannot be written: {error}") from error
    with open_locked(path, "output", failure=failure) as file:
        if not file.is_device:
            lines = file.read()
            for number, line in enumerate(lines):
                _check_line(line, f"{path}:{number + 1}", prompts, number, samples, settings)
            file.truncate_to(lines)
        yield file


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
