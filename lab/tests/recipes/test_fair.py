"""Comparisons are fair: each preset that trains has one grid for all variants and a note on how it was chosen."""

from __future__ import annotations

import re

import pytest

from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe
from kvshift_lab.study.jobs import RunJob

WITHOUT_GRID = {
    ("fig04", "laptop"): "every rate is shown",
    ("fig04c", "laptop"): "every rate is shown",
    ("start_values", "laptop"): "one model from three start values, at the rate that keys_values chose for one of them",
    ("which_mixing", "lower_rate"): "a second rate for baselines whose tuned rate is the end of laptop's grid",
    ("decide", "pilot"): "it measures what seeds change, and decides nothing",
}
FEWER_RATES = {("cfg", "long"): 2, ("both_copy", "laptop"): 2, ("both_copy", "deeper"): 2}
TRAIN = [
    (name, preset)
    for name, entry in CATALOGUE.items()
    for preset in entry.presets
    if preset not in ("smoke", "paper")  # smoke decides nothing, and the paper gives its rates
    and any(isinstance(job, RunJob) for job in find_recipe(name).arms(preset))
]


@pytest.mark.parametrize(("name", "preset"), TRAIN)
def test_all_variants_get_one_grid_of_rates_chosen_by_seeds_that_are_not_reported(name: str, preset: str) -> None:
    size = CATALOGUE[name].presets[preset]
    if (name, preset) in WITHOUT_GRID:
        assert size.grid is None
        return
    assert size.grid is not None
    assert len(size.grid.rates) >= FEWER_RATES.get((name, preset), 4)
    assert not set(size.grid.seeds) & set(size.seed_numbers())


@pytest.mark.parametrize("name", sorted({name for name, _ in TRAIN}))
def test_a_note_says_how_the_small_preset_was_chosen(name: str) -> None:
    said = re.compile(r"(How (the laptop was|they were)|The laptop\b.*) chosen\b")
    assert any(said.search(note) for note in find_recipe(name).notes)
