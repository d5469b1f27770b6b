"""OUT/rows.jsonl: the measurements, a line for each implementation, written as soon as its case is done.

A second run measures the missing cases. It refuses a file whose rows have other options or come from another commit or
machine, so that all numbers of a table are comparable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvshift_lab.benchmarks.cases import Row
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.json_lines import JSONLines, read_lines

_SAME = ("options", "config_hash", "commit", "versions", "hardware")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file. Raise a LabError that names file and line if one cannot be read."""
    return list(read_lines(path))


class RowFile:
    """The rows of one folder, both earlier and new ones."""

    def __init__(self, path: Path, stamp: Mapping[str, Any]) -> None:
        """Read the existing rows.

        Args:
            path: path of rows.jsonl.
            stamp: fields of every row: "config_hash", "options", "commit", "versions", "hardware" and others.

        Raises:
            LabError: an existing row differs in one of those five fields.
        """
        self._path, self._stamp = path, stamp
        self.rows = _complete_cases(path)
        for row in self.rows:
            for name in _SAME:
                if row.get(name) != stamp[name]:
                    raise LabError(
                        f"out: {path} contains rows with other {name}: "
                        f"{_format_value(row.get(name), stamp[name])}; give another folder, or remove that file"
                    )

    def has(self, part: str, case: str) -> bool:
        """Return True if the case has been measured, whether or not it failed."""
        return any(row["part"] == part and row["case"] == case for row in self.rows)

    def append(self, rows: Sequence[Row]) -> None:
        """Append the rows of one case to file and list, marking the last. They are on disk when this returns."""
        if not rows:
            return
        stamped = [{**row, "last": number == len(rows), **self._stamp} for number, row in enumerate(rows, start=1)]
        with JSONLines(self._path) as file:
            file.append(stamped)
        self.rows += stamped


def _complete_cases(path: Path) -> list[Row]:
    """Return the rows of complete cases; remove from the file those of an incomplete case, left by a killed run."""
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
        file.truncate_to(lines[:kept])
    return rows[:kept]


def _format_value(there: Any, here: Any) -> str:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
        return ", ".join(f"{name} {there.get(name)!r} there, {here.get(name)!r} here" for name in names)
    return f"{there!r} there, {here!r} here"
