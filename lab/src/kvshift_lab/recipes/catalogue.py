"""The catalogue of recipes, read from the `ENTRY` of each recipe's folder without importing torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

import kvshift_lab.recipes
from kvshift_lab.core.errors import LabError
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
    "alternatives",
    "phase",
    "decide",
    "keys_values",
    "depth",
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
    "fig05",
    "fig06",
    "encoder",
    "retrofit",
    "mqar",
]
"""Order of the list and of the results page; recipes that are not named here follow in alphabetical order."""


def _load_entries() -> dict[str, Entry]:
    """Return the `ENTRY` of every folder that has one; the other folders hold code shared by the recipes of a study."""
    folders = [module.name for module in iter_modules(kvshift_lab.recipes.__path__) if module.ispkg]
    found = {name: getattr(import_module(f"kvshift_lab.recipes.{name}"), "ENTRY", None) for name in folders}
    order = [*_ORDER, *sorted(found.keys() - {*_ORDER})]
    return {name: entry for name in order if (entry := found[name]) is not None}


CATALOGUE: Mapping[str, Entry] = _load_entries()


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; the notes in its folder precede the notes that it shares with other recipes."""
    if name not in CATALOGUE:
        raise LabError(f"recipe must be one of {', '.join(CATALOGUE)}, got {name!r}")
    recipe = import_module(f"kvshift_lab.recipes.{name}.study").RECIPE
    notes = read_notes(Path(__file__).parent / name)
    return replace(recipe, notes=(*notes, *recipe.notes))
