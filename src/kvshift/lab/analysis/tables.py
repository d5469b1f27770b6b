"""Tables for terminals and in Markdown; the first row is the heading."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["as_markdown", "as_text"]

Rows = Sequence[Sequence[str]]


def as_text(rows: Rows, *, left: int | None = 1, rule: bool = False) -> str:
    """Aligned columns.

    Args:
        rows: of cells; a row may be shorter than others, and what stands in its last cell does not widen a column.
        left: how many columns are words, set to the left; the others are numbers. None: all.
        rule: a line below the heading.
    """
    columns = max(map(len, rows))
    whole = [row for row in rows if len(row) == columns]
    widths = [max(len(row[column]) for row in whole) for column in range(columns)]
    lines = [
        "  ".join(
            cell.ljust(width) if left is None or number < left or len(row) < columns else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]
    if rule:
        lines.insert(1, "-" * (sum(widths) + 2 * (columns - 1)))
    return "\n".join(lines)


def as_markdown(rows: Rows, *, left: int | None = 1) -> str:
    """The table in Markdown; `left`: see `as_text`."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    rule = ["---" if left is None or number < left else "---:" for number in range(len(rows[0]))]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])
