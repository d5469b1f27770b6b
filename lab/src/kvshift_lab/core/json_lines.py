"""JSON Lines files, with one record on each line. A file is replaced as a whole, so that it is always complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvshift_lab.core.atomic import write_bytes
from kvshift_lab.core.errors import LabError


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON Lines file. Raise a LabError that names the file and line of an error."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise LabError(f"{path}:{number}: not a line of JSON: {error}") from error


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace all lines of a file atomically; its folder is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records)
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode())
