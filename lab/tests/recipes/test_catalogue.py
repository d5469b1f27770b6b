"""The catalogue lists every recipe folder, with the header, the study and the notes of each."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvshift_lab.recipes
from kvshift_lab.recipes import tables
from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe

FOLDER = Path(kvshift_lab.recipes.__file__).parent


def test_every_recipe_is_listed_by_the_name_of_its_folder() -> None:
    alone = {path.parent.name for path in FOLDER.glob("*/study.py")} - {"tables"}
    assert set(CATALOGUE) == alone | {entry.name for entry in tables.ENTRIES}
    assert {name: entry.name for name, entry in CATALOGUE.items()} == {name: name for name in CATALOGUE}
    assert len(CATALOGUE) >= 30


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_study_is_that_of_its_header(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.entry is CATALOGUE[name]
    assert recipe.notes
    notes = FOLDER / name / "notes.md" if (FOLDER / name).exists() else FOLDER / "tables" / f"{name}.md"
    if notes.exists():
        assert notes.read_text(encoding="utf-8").count("\n- ") + 1 <= len(recipe.notes)
        assert recipe.notes[0].split() == notes.read_text(encoding="utf-8").partition("\n- ")[0].split()[1:]
