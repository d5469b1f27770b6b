"""All recipes by name; a recipe's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from kvshift.lab.errors import LabError
from kvshift.recipes.recipe import Recipe

__all__ = ["NAMES", "find_recipe"]

NAMES = ("fig01a", "fig01b", "fig02", "fig08", "fig09", "tab03", "tab04", "cfg", "mqar")


def find_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in NAMES:
        raise LabError(f"recipe: there is no {name!r}; there are {', '.join(NAMES)}")
    return import_module(f"kvshift.recipes.{name}").RECIPE
