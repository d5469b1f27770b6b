"""Pages of docs/ of which a part is made from files under results/: written, or compared with what they give."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvshift.lab.core.atomic import write_bytes
from kvshift.lab.core.errors import LabError


def write_or_check(
    program: str, arguments: Sequence[str], page: Path, results: Path, made: Callable[[str], str]
) -> int:
    """What `python -m program [--check]` does; returns the exit code.

    Args:
        program: the module, as a user types it.
        arguments: none, to write the page; "--check", to write nothing and fail where it is not what `results` gives.
        page, results: in the working directory.
        made: from the text of the page to the text that it is to have. A LabError is said, and the page left alone.
    """
    if list(arguments) not in ([], ["--check"]):
        print(f"usage: python -m {program} [--check], got {' '.join(arguments)}", file=sys.stderr)
        return 2
    old = page.read_text(encoding="utf-8")
    try:
        new = made(old)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    if new == old:
        return 0
    if arguments:
        print(f"{page} is not what {results} gives: run `make results` and commit what it changes", file=sys.stderr)
        return 1
    write_bytes(page, new.encode())
    return 0
