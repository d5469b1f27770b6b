"""Published records match the current presets: changing an option, grid or seed requires new runs.

No published run reads its text twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe
from kvshift_lab.study.recipe import without_tuning_runs
from kvshift_lab.study.records import load_records
from kvshift_lab.study.tuning import at_best_rates, best_rates, tuning_jobs

RESULTS = Path(__file__).parents[3] / "results"
PUBLISHED = [
    (name, preset)
    for name, entry in CATALOGUE.items()
    for preset in entry.presets
    if (RESULTS / entry.runs / f"{preset}.jsonl").exists()
]


@pytest.mark.parametrize(("name", "preset"), PUBLISHED)
def test_published_runs_are_those_of_the_preset(name: str, preset: str) -> None:
    recipe = find_recipe(name)
    records = load_records(RESULTS, recipe, preset)
    if records is None:
        pytest.skip("its study has others' runs alone")
    shown, grid = without_tuning_runs(records), recipe.presets[preset].grid
    jobs = recipe.jobs(preset, sorted({record.seed for record in shown}))
    if grid is not None:
        tuning = [record for record in records if record.tuning_for is not None]
        searched = tuning_jobs(recipe.jobs(preset, grid.seeds), grid)
        jobs = [*searched, *at_best_rates(jobs, best_rates(tuning, recipe.tuned_by))]
    by_run = {(record.arm, record.seed): record for record in records}
    for options in (record.options for record in records if "train_rows" in record.options.get("data_facts", {})):
        assert options["steps"] * options["batch_size"] <= options["data_facts"]["train_rows"], "a text is read twice"
    assert {(job.arm, job.seed) for job in jobs} == set(by_run)
    assert {job.arm: lines for job in jobs if (lines := job.other_options(by_run[job.arm, job.seed].options))} == {}
