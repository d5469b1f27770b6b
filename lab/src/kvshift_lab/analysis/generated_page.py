"""Write or check pages of docs/ that are partly generated from files under results/."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvshift_lab.core.atomic import write_bytes
from kvshift_lab.core.errors import LabError


def write_or_check(
    program: str,
    arguments: Sequence[str],
    page: Path,
    results: Path,
    markers: Sequence[str],
    generate: Callable[[], str],
) -> int:
    """Run `program [--check]` and return the exit code.

    Args:
        program: The command, for messages.
        arguments: Empty to write the page; ["--check"] to write nothing and fail if the page is out of date.
        page, results: Paths relative to the working directory; `results` is only named in messages.
        markers: Lines of the page between which the generated text is placed. With a single marker, the generated text
            extends to the end of the page.
        generate: Generates the text. If it raises a LabError, the error is printed and the page stays unchanged.
    """
    if list(arguments) not in ([], ["--check"]):
        print(f"usage: {program} [--check], got {' '.join(arguments)}", file=sys.stderr)
        return 2
    old = page.read_text(encoding="utf-8")
    try:
        if not all(marker in old for marker in markers):
            raise LabError(f"{page} must contain the line {' and the line '.join(map(str.strip, markers))}")
        head, begin, rest = old.partition(markers[0])
        new = f"{head}{begin}\n{generate()}"
        for end in markers[1:]:
            new += f"\n{end}{rest.partition(end)[2]}"
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    if new == old:
        return 0
    if arguments:
        print(f"{page} is out of date with {results}: run `make results` and commit the changes", file=sys.stderr)
        return 1
    write_bytes(page, new.encode())
    return 0
