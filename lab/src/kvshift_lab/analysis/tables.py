"""Tables for terminals and in Markdown. The first row is the heading."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def as_text(rows: Rows, *, left: int | None = 1, rule: bool = False, width: int | None = None) -> str:
    """Format rows as aligned columns.

    Args:
        rows: Rows of cells. A row may be shorter than others; its cells do not widen the columns.
        left: Number of leading text columns, which are left-aligned. The others contain numbers and are right-aligned.
            None: all columns are text.
        rule: Draw a line below the heading.
        width: Maximum number of characters per line, for which the last column is wrapped. None: no limit.
    """
    columns = max(map(len, rows))
    complete = [row for row in rows if len(row) == columns]
    widths = [max(len(row[column]) for row in complete) for column in range(columns)]
    if width is not None:
        rows = [part for row in rows for part in _wrapped(row, widths, width)]
    lines = [
        "  ".join(
            cell.ljust(size) if left is None or number < left or len(row) < columns else cell.rjust(size)
            for number, (cell, size) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]
    if rule:
        lines.insert(1, "-" * (sum(widths) + 2 * (columns - 1)))
    return "\n".join(lines)


def _wrapped(row: Sequence[str], widths: Sequence[int], width: int) -> Rows:
    """Split a row whose last cell is too long into several rows, each with a part of that cell."""
    *others, last = row
    before = sum(widths[: len(others)]) + 2 * len(others)
    first, *more = textwrap.wrap(last, max(1, width - before)) or [""]
    return [(*others, first), *((*[""] * len(others), part) for part in more)]


def as_markdown(rows: Rows, *, left: int | None = 1) -> str:
    """Format rows as a Markdown table; for `left`, see `as_text`."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    rule = ["---" if left is None or number < left else "---:" for number in range(len(rows[0]))]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])
