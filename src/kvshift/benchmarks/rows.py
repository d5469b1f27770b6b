"""OUT/rows.jsonl: what was measured, a line for each implementation, written as soon as its case is done.

A second call measures the cases that are missing. Rows of other options, of another commit or of another machine
are not added to: numbers of one table are to be of one kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvshift.benchmarks.cases import Row
from kvshift.lab.core.errors import LabError
from kvshift.lab.core.json_lines import JSONLines, read_lines

_SAME = ("options", "config_hash", "commit", "versions", "hardware")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; raises LabError that names file and line."""
    return list(read_lines(path))


class RowFile:
    """The rows of one folder, old and new."""

    def __init__(self, path: Path, stamp: Mapping[str, Any]) -> None:
        """Read what is there.

        Args:
            path: of rows.jsonl.
            stamp: what every row carries: "config_hash", "options", "commit", "versions", "hardware" and more.

        Raises:
            LabError: the rows there differ in one of those five.
        """
        self._path, self._stamp = path, stamp
        self.rows = _whole_cases(path)
        for row in self.rows:
            for name in _SAME:
                if row.get(name) != stamp[name]:
                    raise LabError(
                        f"out: {path} contains rows with other {name}: "
                        f"{_say(row.get(name), stamp[name])}; give another folder, or remove that file"
                    )

    def has(self, part: str, case: str) -> bool:
        """Whether the case is done, well or badly."""
        return any(row["part"] == part and row["case"] == case for row in self.rows)

    def append(self, rows: Sequence[Row]) -> None:
        """Add the rows of one case, the last marked as such, to file and list; on the disk when this returns."""
        if not rows:
            return
        stamped = [{**row, "last": number == len(rows), **self._stamp} for number, row in enumerate(rows, start=1)]
        with JSONLines(self._path) as file:
            file.append(stamped)
        self.rows += stamped


def _whole_cases(path: Path) -> list[Row]:
    """Rows up to the last that ends a case; what a killed call left beyond it is cut off, in the file too."""
    if not path.exists():
        return []
    rows: list[Row] = []
    kept = 0
    with JSONLines(path) as file:
        lines = file.read()
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
            if rows[-1].get("last"):
                kept = len(rows)
        if not kept and len(rows) > 0 and "last" not in rows[0]:
            raise LabError(f"out: {path} contains no rows of `kvshift bench`; give another folder")
        file.keep(lines[:kept])
    return rows[:kept]


def _say(there: Any, here: Any) -> str:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
        return ", ".join(f"{name} {there.get(name)!r} there, {here.get(name)!r} here" for name in names)
    return f"{there!r} there, {here!r} here"
