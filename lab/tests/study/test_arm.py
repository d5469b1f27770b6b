"""Arms as data: their labels, and how records are read back, including old ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe
from kvshift_lab.study.arm import Arm, arm_from_label, pair
from kvshift_lab.study.records import read_records, write_records

from .cases import made_up


@pytest.mark.parametrize(
    ("arm", "label"),
    [
        (Arm(variant="kv-shift", layers=1), "KV-shift, 1 layer"),
        (Arm(variant="kv-shift-gate", layers=2, length=128), "KV-shift, gate, 2 layers, 128 tokens"),
        (Arm(variant="kv-shift", layers=2, length=32, width=64), "KV-shift, 2 layers, 32 tokens, width 64"),
        (Arm(variant="vanilla", case="2 layers of width 32", steps=1200), "vanilla, 2 layers of width 32, 1200 steps"),
        (Arm(variant="vanilla", rate=1e-4), "vanilla, rate 0.0001"),
        (Arm(case="width 64, 2 heads of 32, rate 0.004"), "width 64, 2 heads of 32, rate 0.004"),
    ],
    ids=str,
)
def test_an_arm_and_its_label_say_the_same(arm: Arm, label: str) -> None:
    assert arm.label == str(arm) == label
    assert arm_from_label(label) == arm


def test_a_pair_differs_in_the_shift_alone() -> None:
    ours, theirs = pair(layers=2)
    assert (ours.variant, theirs.variant) == ("kv-shift", "vanilla")
    assert replace(ours, variant="vanilla") == theirs


@pytest.mark.parametrize("name", CATALOGUE)
def test_records_of_before_there_were_arms_are_found_by_the_arms_of_today(name: str) -> None:
    recipe = find_recipe(name)
    for preset in recipe.presets:
        for job in recipe.arms(preset):
            assert arm_from_label(job.arm.label) == job.arm


def test_a_record_says_its_arm_as_data(tmp_path: Path) -> None:
    tuned = Arm(case="no shift")
    run = replace(made_up(tuned, options={"optimizer": {"learning_rate": 2e-3}}), arm=replace(tuned, rate=2e-3))
    records = [replace(run, tuning_for=tuned), made_up(Arm(variant="kv-shift", layers=1))]
    path = tmp_path / "records.jsonl"
    write_records(path, records)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["arm"], line["tunes"]) for line in lines] == [
        ({"case": "no shift", "rate": 2e-3}, {"case": "no shift"}),
        ({"variant": "kv-shift", "layers": 1}, None),
    ]
    assert read_records(path) == records
    for line, (label, tuned_label) in zip(
        lines, (("no shift, rate 0.002", "no shift"), ("KV-shift, 1 layer", None)), strict=True
    ):
        del line["arm"]
        line |= {"label": label, "tunes": tuned_label}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_records(path) == records
