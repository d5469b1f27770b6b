"""Pages of docs/ of which a part is made from files under results/: written, or compared with what they give."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvshift.lab.core.atomic import write_bytes
from kvshift.lab.core.errors import LabError


def write_or_check(
    program: str, arguments: Sequence[str], page: Path, results: Path, markers: Sequence[str], made: Callable[[], str]
) -> int:
    """What `python -m program [--check]` does; returns the exit code.

    Args:
        program: the module, as a user types it.
        arguments: none, to write the page; "--check", to write nothing and fail where it is not what `results` gives.
        page, results: in the working directory.
        markers: lines of the page between which the made text stands; one alone: it stands from there to the end.
        made: the text. A LabError is said, and the page left alone.
    """
    if list(arguments) not in ([], ["--check"]):
        print(f"usage: python -m {program} [--check], got {' '.join(arguments)}", file=sys.stderr)
        return 2
    old = page.read_text(encoding="utf-8")
    try:
        if not all(marker in old for marker in markers):
            raise LabError(f"{page} has lost a marker: {' or '.join(map(str.strip, markers))}")
        head, begin, rest = old.partition(markers[0])
        new = f"{head}{begin}\n{made()}"
        for end in markers[1:]:
            new += f"\n{end}{rest.partition(end)[2]}"
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
