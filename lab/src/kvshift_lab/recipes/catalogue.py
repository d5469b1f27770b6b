"""The catalogue of recipes, read from the `ENTRY` of each recipe's folder without importing torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

import kvshift_lab.recipes
from kvshift_lab.core.errors import LabError, nearest
from kvshift_lab.study.entry import Entry
from kvshift_lab.study.notes import read_notes

if TYPE_CHECKING:
    from kvshift_lab.study.recipe import Recipe

_ORDER = [
    "fig01a",
    "fig01b",
    "fig02",
    "fig08",
    "fig09",
    "tab03",
    "tab04",
    "cfg",
    "decide",
    "keys_values",
    "start_values",
    "which_mixing",
    "tab06",
    "tab07",
    "tab08",
    "tab09",
    "tab10",
    "tab11",
    "tab12",
    "tab13",
    "fig07a",
    "fig07b",
    "fig10",
    "fig11",
    "tab15",
    "tab05",
    "neighbours",
    "fig03",
    "fig04",
    "fig04c",
    "fig05",
    "fig06",
    "encoder",
    "repetition",
    "mqar",
]
"""Order of the list and of the results page; recipes that are not named here follow in alphabetical order."""


def _load_folders() -> dict[str, tuple[str, Entry]]:
    """Return the folder and the entry of each recipe.

    A folder has the `ENTRY` of one recipe or the `ENTRIES` of several, or neither: code that recipes of a study share.
    """
    found: dict[str, tuple[str, Entry]] = {}
    for module in iter_modules(kvshift_lab.recipes.__path__):
        if module.ispkg:
            folder = import_module(f"kvshift_lab.recipes.{module.name}")
            entries = [folder.ENTRY] if hasattr(folder, "ENTRY") else getattr(folder, "ENTRIES", ())
            found |= {entry.name: (module.name, entry) for entry in entries}
    order = [*_ORDER, *sorted(found.keys() - {*_ORDER})]
    return {name: found[name] for name in order}


_FOLDERS = _load_folders()
CATALOGUE: Mapping[str, Entry] = {name: entry for name, (_, entry) in _FOLDERS.items()}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; its own notes precede those that it shares with other recipes."""
    if name not in CATALOGUE:
        raise LabError(f"there is no recipe {name!r}; {nearest(name, CATALOGUE)}")
    folder = _FOLDERS[name][0]
    study = import_module(f"kvshift_lab.recipes.{folder}.study")
    recipe = study.RECIPE if hasattr(study, "RECIPE") else study.RECIPES[name]
    notes = read_notes(Path(__file__).parent / folder / ("notes.md" if folder == name else f"{name}.md"))
    return replace(recipe, notes=(*notes, *recipe.notes))
