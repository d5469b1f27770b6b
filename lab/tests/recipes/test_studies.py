"""Recipes of one study share runs: a job of two recipes runs once, and all records are kept in one file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvshift_lab.commands.reproduce import reproduce as module
from kvshift_lab.commands.reproduce.reproduce import ReproduceConfig, reproduce
from kvshift_lab.study.records import load_records, read_records, write_records
from kvshift_lab.study.run_study import job_folder

from ..study.cases import Counting, counting_recipe, made_up, runs


def test_what_two_recipes_share_is_run_once_and_kept_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = {
        name: counting_recipe(labels, name=name, study="counting")
        for name, labels in (("abacus", "ab"), ("rosary", "bc"))
    }
    monkeypatch.setattr(module, "find_recipe", recipes.__getitem__)
    kept, out = tmp_path / "kept", tmp_path / "out"
    for done, name in enumerate(recipes):
        assert load_records(kept, recipes["rosary"], "smoke") is None, done
        reproduce(ReproduceConfig(recipe=name, preset="smoke", out=out, results=kept, jobs=1))
    for label in "abc":
        for seed in (0, 1):
            assert runs(job_folder(out / "counting/smoke", Counting(label=f"Beads, {label}", seed=seed))) == 1
    whole = read_records(kept / "counting/smoke.jsonl")
    assert [record.arm.label[-1] for record in whole] == ["a", "a", "b", "b", "c", "c"]
    assert not (kept / "counting/smoke.partial.jsonl").exists()
    for name, labels in (("abacus", "aabb"), ("rosary", "bbcc")):
        found = load_records(kept, recipes[name], "smoke")
        assert found is not None
        assert [record.arm.label[-1] for record in found] == [*labels]
        assert read_records(out / name / "smoke/records.jsonl") == found
        assert (out / name / "smoke/report.md").exists()


def test_of_a_study_seeds_count_that_all_labels_have(tmp_path: Path) -> None:
    recipe = counting_recipe("ab", study="counting")
    beads = {"beads": 7}
    records = [replace(made_up(f"Beads, {label}", seed), options=beads) for label in "ab" for seed in (0, 1, 2)]
    write_records(tmp_path / "counting/smoke.jsonl", records[:-1])  # the last seed of b is missing
    found = load_records(tmp_path, recipe, "smoke")
    assert found is not None
    assert [(record.arm.label[-1], record.seed) for record in found] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    older = [replace(record, options={"beads": 5}) for record in records if record.seed == 2]
    write_records(tmp_path / "counting/smoke.jsonl", [*(one for one in records if one.seed < 2), *older])
    assert load_records(tmp_path, recipe, "smoke") == found
    write_records(tmp_path / "counting/smoke.jsonl", records[:4])  # b has one seed
    assert load_records(tmp_path, recipe, "smoke") is None
