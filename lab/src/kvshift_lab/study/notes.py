"""The notes of a recipe: a Markdown file beside its code."""

from __future__ import annotations

from pathlib import Path


def read_notes(path: Path) -> tuple[str, ...]:
    """Return the items of the list in a Markdown file, each as one line; () if there is no such file."""
    if not path.exists():
        return ()
    text = path.read_text(encoding="utf-8")
    return tuple(" ".join(item.split()) for item in text.removeprefix("- ").split("\n- "))
