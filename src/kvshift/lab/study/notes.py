"""The notes of a recipe, which are Markdown in its folder."""

from __future__ import annotations

from pathlib import Path


def read_notes(module: str) -> tuple[str, ...]:
    """The items of the list that `notes.md` beside a module holds, each as one line.

    Args:
        module: `__file__` of the module.
    """
    text = Path(module).with_name("notes.md").read_text(encoding="utf-8")
    return tuple(" ".join(item.split()) for item in text.removeprefix("- ").split("\n- "))
