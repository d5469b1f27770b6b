"""Names that the problems are about: systems of four categories, each within the one before, from `names.txt`.

Every item's name has two words or more and no two are the same, so an item tells its category. None holds "as", a
number or a sign, which the texts need for themselves. The first system has the categories of kaminocode/iGSM (School,
Classroom, Backpack, Stationery, ten items each); the items are our own words.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple


class Category(NamedTuple):
    """A level of a system: what its items are called together, and their names."""

    name: str
    items: tuple[str, ...]


def _category(line: str) -> Category:
    name, items = line.split(": ")
    return Category(name, tuple(items.split(", ")))


SYSTEMS = tuple(
    tuple(map(_category, system.splitlines()))
    for system in (files("kvshift.lab.tasks.igsm") / "names.txt").read_text(encoding="utf-8").split("\n\n")
)
