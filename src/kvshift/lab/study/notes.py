"""The notes of a recipe, which are Markdown in its folder."""

from __future__ import annotations

from pathlib import Path


def read_notes(folder: Path) -> tuple[str, ...]:
    """The items of the list that `notes.md` in a folder holds, each as one line; none where there is no such file."""
    path = folder / "notes.md"
    if not path.exists():
        return ()
    text = path.read_text(encoding="utf-8")
    return tuple(" ".join(item.split()) for item in text.removeprefix("- ").split("\n- "))
