"""The catalogue lists every recipe folder, with the header, the study and the notes of each."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvshift_lab.recipes
from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe

pytestmark = pytest.mark.no_models

FOLDER = Path(kvshift_lab.recipes.__file__).parent
STUDIES = {path.parent.name for path in FOLDER.glob("*/study.py")}


def test_every_folder_with_a_study_is_listed_by_its_own_name() -> None:
    assert set(CATALOGUE) == STUDIES
    assert {name: entry.name for name, entry in CATALOGUE.items()} == {name: name for name in STUDIES}
    assert len(STUDIES) >= 34


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_study_is_that_of_its_header(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.entry is CATALOGUE[name]
    assert recipe.notes
    notes = FOLDER / name / "notes.md"
    if notes.exists():
        assert notes.read_text(encoding="utf-8").count("\n- ") + 1 <= len(recipe.notes)
        assert recipe.notes[0].split() == notes.read_text(encoding="utf-8").partition("\n- ")[0].split()[1:]


def test_what_recipes_share_is_in_the_folder_of_their_study() -> None:
    shared = {entry.study for entry in CATALOGUE.values()} - {None}
    assert shared == {path.name for path in FOLDER.iterdir() if (path / "__init__.py").exists()} - STUDIES
