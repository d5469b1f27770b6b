"""Names in the problems: systems of four categories, each within the previous one, from `names.txt`.

Every item's name has two or more words and is unique, so an item determines its category. No name contains "as", a
number or a sign, which have a meaning in the texts. The first system has the categories of kaminocode/iGSM (School,
Classroom, Backpack, Stationery, ten items each), but different items.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple


class Category(NamedTuple):
    """A level of a system: the name of the category and the names of its items."""

    name: str
    items: tuple[str, ...]


def _category(line: str) -> Category:
    name, items = line.split(": ")
    return Category(name, tuple(items.split(", ")))


SYSTEMS = tuple(
    tuple(map(_category, system.splitlines()))
    for system in (files("kvshift_lab.tasks.igsm") / "names.txt").read_text(encoding="utf-8").split("\n\n")
)
