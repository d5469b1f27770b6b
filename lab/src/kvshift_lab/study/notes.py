"""The notes of a recipe: a Markdown file in its folder."""

from __future__ import annotations

from pathlib import Path


def read_notes(folder: Path) -> tuple[str, ...]:
    """Return the items of the list in a folder's `notes.md`, each as one line; () if there is no such file."""
    path = folder / "notes.md"
    if not path.exists():
        return ()
    text = path.read_text(encoding="utf-8")
    return tuple(" ".join(item.split()) for item in text.removeprefix("- ").split("\n- "))
