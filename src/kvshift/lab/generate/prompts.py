"""Prompts from a file, and their continuations into one, a line each, so that a stopped process can be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvshift.lab.core.errors import LabError, require_unicode
from kvshift.lab.core.json_lines import JSONLines, open_locked


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


@contextmanager
def answers_in(path: Path, prompts: Sequence[str], samples: int, settings: str) -> Iterator[JSONLines]:
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
    failure = "output: writing to {path} failed: {error}"
    if not path.exists() or path.is_file():
        failure += "; its {count} lines are whole, and the same command resumes after them"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"output: {path} cannot be written: {error}") from error
    with open_locked(path, "output", failure=failure) as file:
        if not file.is_device:
            lines = file.read()
            for number, line in enumerate(lines):
                _check_line(line, f"{path}:{number + 1}", prompts, number, samples, settings)
            file.keep(lines)
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
