"""The recipe `alternatives` (other readings of Figure 1a): its jobs, its verdicts and its figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvshift_lab.recipes.alternatives import study as alternatives
from kvshift_lab.recipes.alternatives.study import MODELS, OURS, READINGS
from kvshift_lab.recipes.fig01a import study as fig01a
from kvshift_lab.study.recipe import Record

from ..study.cases import directions, made_up

pytestmark = pytest.mark.no_models
RECIPE = alternatives.RECIPE
OPTIONS = {"task": {"name": "induction", "length": 16, "vocab_size": 64}, "steps": 400}


def records(ratios: dict[str, list[float]]) -> list[Record]:
    """Return runs: two plain layers reach 90 % soon after step 200, one shifted layer at a ratio of that, by seed."""
    found = []
    for reading in READINGS:
        for seed, ratio in enumerate(ratios.get(reading.words, [0.25, 0.26, 0.27])):
            for model in MODELS:
                at = (200 + 7 * seed) * (ratio if model[1] == "kv-shift" else 1)
                curve = {"step": [1, at, 400], "first_repeat": [0.1, 0.9, 1.0], "loss": [3.0, 1.0, 0.5]}
                found.append(made_up(alternatives._arm(model, reading), seed, curve=curve, options=OPTIONS))
    return found


@pytest.mark.parametrize("preset", RECIPE.presets)
def test_readings_differ_from_ours_in_one_thing(preset: str):
    jobs = {job.arm: job.config for job in RECIPE.jobs(preset, [7])}
    assert len(jobs) == 8
    figure = {job.arm: job.config for job in fig01a.RECIPE.jobs(preset, [7])}  # one study: the runs are shared
    config, width, _ = fig01a.SIZES[preset]
    for model in MODELS:
        ours = jobs[alternatives._arm(model, OURS)]
        assert ours == figure[alternatives._arm(model, OURS)]
        loss, latest, mlp = (jobs[alternatives._arm(model, reading)] for reading in READINGS[1:])
        assert loss == replace(ours, task=replace(config.task, loss="repeats"))
        assert latest == replace(ours, task=replace(config.task, mode="latest"))
        assert mlp == replace(ours, model=replace(ours.model, intermediate_size=5 * width))


@pytest.mark.parametrize(
    ("ratios", "half", "alike"),
    [
        ([0.25, 0.24, 0.28], "holds", "holds"),
        ([0.05, 0.052, 0.053], "holds", "fails"),
        ([0.9, 0.95, 0.92], "fails", "fails"),
        ([0.1, 0.4, 0.3], "not shown", "not shown"),
    ],
)
def test_each_reading_has_its_verdict_and_whether_it_matters(ratios: list[float], half: str, alike: str):
    found = directions(RECIPE, records({"mode latest": ratios}))
    assert len(found) == 7
    for statement, direction in found.items():
        if "half" in statement:
            assert direction == (half if statement.startswith("Mode latest") else "holds")
        elif statement.startswith("Mode latest"):
            assert direction == alike


@pytest.mark.parametrize("reading", READINGS[:2], ids=["ours", "other"])
def test_a_reading_by_which_some_run_does_not_learn_leaves_open_whether_it_matters(reading: alternatives.Reading):
    given = records({})
    slow = alternatives._arm((2, "vanilla"), reading)
    curve = {"step": [1, 400], "first_repeat": [0.1, 0.5]}
    given = [replace(one, curve=curve) if one.arm == slow else one for one in given]
    claims = RECIPE.claims(given)
    assert len(claims) == 7
    half, *_ = (claim for claim in claims if claim.statement.startswith(alternatives._reading_title(reading)))
    assert half.direction == "not shown"  # three seeds of three are too few
    assert "not reached within 400 steps by 3 of 3 seeds" in half.ours
    which = "ours" if reading is OURS else "this reading"
    open_ones = [claim for claim in claims if claim.ours == f"no ratio: by {which} some run has not reached 90 %"]
    assert len(open_ones) == (3 if reading is OURS else 1)
    assert {claim.direction for claim in open_ones} == {"not shown"}


def test_the_figure_has_a_panel_for_each_reading():
    """Panel titles also stay within the figure."""
    figure = RECIPE.plot(records({}))
    figure.draw_without_rendering()
    panels = figure.axes
    assert [" ".join(axes.get_title().split()) for axes in panels] == [reading.words for reading in READINGS]
    for axes in panels:
        assert axes.title.get_window_extent().x1 <= figure.bbox.x1
        assert axes.get_legend_handles_labels()[1] == ["vanilla, 2 layers", "KV-shift, 1 layer", "chance"]
