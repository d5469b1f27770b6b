"""Each variant gets its own best learning rate of one grid, chosen on seeds that are not reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from kvshift_lab import cli
from kvshift_lab.commands.reproduce import reproduce as module
from kvshift_lab.recipes.cfg import study as cfg
from kvshift_lab.recipes.fig01a import study as fig01a
from kvshift_lab.recipes.mqar import study as mqar
from kvshift_lab.study.arm import Arm, arm_from_label
from kvshift_lab.study.entry import Grid
from kvshift_lab.study.jobs import Computation, TrainingJob
from kvshift_lab.study.recipe import LEAST_LOSS, Recipe, Record, without_tuning_runs
from kvshift_lab.study.records import read_records
from kvshift_lab.study.tuning import at_best_rates, best_rates, reached_soonest, tuning_jobs

from .cases import made_up

SCORE = reached_soonest("queries", 0.99, last=1)


def run(variant: str, rate: float, final: float, *, reached: int = 200, seed: int = 1000) -> Record:
    """Return a tuning run that stays at 10 % until just before step `reached`, and is at `final` from there on."""
    options = {"optimizer": {"learning_rate": rate}, "steps": 400}
    curve = {"step": [1, reached - 1, reached, 400], "queries": [0.1, 0.1, final, final], "loss": [3.0, 3.0, 1.0, 1.0]}
    return replace(
        made_up(f"{variant}, rate {rate}", seed, curve=curve, options=options), tuning_for=arm_from_label(variant)
    )


def test_every_variant_gets_the_same_grid_and_its_own_best_rate():
    found = [run("fast", rate, final) for rate, final in ((1e-3, 0.5), (1e-2, 1.0))]
    found += [run("slow", rate, final) for rate, final in ((1e-3, 0.98), (1e-2, 0.2))]
    assert best_rates(found, SCORE) == {Arm(case="fast"): 1e-2, Arm(case="slow"): 1e-3}


def test_of_rates_that_reach_the_level_the_one_that_does_so_soonest():
    found = [run("a", rate, final, reached=step) for rate, final, step in ((1e-3, 1.0, 300), (1e-2, 0.992, 50))]
    assert best_rates(found, SCORE) == {Arm(case="a"): 1e-2}


def test_of_equals_the_lowest_rate_whatever_the_order():
    found = [run("a", rate, 1.0) for rate in (1e-2, 1e-3, 5e-3)]
    assert best_rates(found, SCORE) == {Arm(case="a"): 1e-3}


def test_the_mean_over_seeds_decides():
    found = [run("a", 1e-3, 0.6, seed=seed) for seed in (1000, 1001)]
    found += [run("a", 1e-2, final, seed=seed) for final, seed in ((0.9, 1000), (0.1, 1001))]
    assert best_rates(found, SCORE) == {Arm(case="a"): 1e-3}


def test_a_run_that_ends_before_it_reaches_the_level_counts_as_later_than_any():
    assert SCORE(run("a", 1e-3, 0.98)) == (0.98, -400.0)
    assert SCORE(run("a", 1e-3, 1.0, reached=51)) > (0.99, -51.0)


def test_a_spike_at_the_last_step_costs_no_variant_its_rate():
    good, bad = run("a", 1e-3, 1.0), run("a", 1e-2, 0.95)
    curve = {**good.curve, "step": [1, 199, 200, 380, 390, 400], "queries": [0.1, 0.1, 1.0, 1.0, 1.0, 0.9]}
    spiked = replace(good, curve=curve)
    assert best_rates([spiked, bad], SCORE) == {Arm(case="a"): 1e-2}
    assert best_rates([spiked, bad], reached_soonest("queries", 0.99, last=3)) == {Arm(case="a"): 1e-3}


def test_a_score_by_loss():
    one, other = run("a", 1e-3, 0.9), run("a", 1e-2, 0.8)
    other = replace(other, curve={**other.curve, "loss": [3.0, 3.0, 1.0, 0.5]})
    assert best_rates([one, other], LEAST_LOSS) == {Arm(case="a"): 1e-2}


def test_tuning_runs_differ_in_the_rate_alone_and_share_no_seed_with_the_reported():
    preset = mqar.RECIPE.presets["laptop"]
    assert preset.grid is not None
    jobs = tuning_jobs(mqar.RECIPE.jobs("laptop", preset.grid.seeds), preset.grid)
    variants = {job.arm for job in mqar.RECIPE.jobs("laptop", range(preset.seeds))}
    asked = {(job.tuning_for, job.config.optimizer.learning_rate, job.seed) for job in jobs}
    assert asked == {
        (variant, rate, seed) for variant in variants for rate in preset.grid.rates for seed in preset.grid.seeds
    }
    assert not {job.seed for job in jobs} & set(range(preset.seeds))
    for job in jobs:
        counterpart = next(one for one in mqar.RECIPE.jobs("laptop", [job.seed]) if one.arm == job.tuning_for)
        optimizer = replace(counterpart.config.optimizer, learning_rate=job.config.optimizer.learning_rate)
        assert job.config == replace(counterpart.config, optimizer=optimizer)


def test_reported_runs_are_at_the_chosen_rate():
    arms = mqar.arms("smoke")
    jobs = at_best_rates(arms, dict.fromkeys((job.arm for job in arms), 0.125))
    assert {job.config.optimizer.learning_rate for job in jobs} == {0.125}
    assert [job.arm for job in jobs] == [job.arm for job in arms]
    assert all(job.tuning_for is None for job in jobs)


@pytest.mark.parametrize(("rates", "seeds"), [((), (1000,)), ((1e-2, 1e-3), (1000,)), ((1e-3,), ()), ((1e-3,), (3,))])
def test_grids_that_are_none(rates: tuple[float, ...], seeds: tuple[int, ...]):
    with pytest.raises(ValueError, match="must be one or more"):
        Grid(rates=rates, seeds=seeds)


def test_what_does_not_train_is_not_tuned_and_stays_as_it_is():
    job = Computation(arm=Arm(case="a sum"), config=None, function=lambda config: {})
    assert tuning_jobs([job], Grid(rates=(1e-3,), seeds=(1000,))) == []
    assert at_best_rates([job], {}) == [job]


@pytest.fixture
def two_variants(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe of MQAR's two models of one layer, one step each; the smoke preset has twice the runs (`test_smoke`)."""

    def arms(preset: str) -> list[TrainingJob]:
        return [replace(job, config=replace(job.config, steps=1)) for job in mqar.arms(preset)[2:]]

    recipe = replace(mqar.RECIPE, arms=arms, claims=lambda records: [], plot=lambda records: Figure())
    monkeypatch.setattr(module, "find_recipe", lambda name: recipe)
    return recipe


def test_the_command_tunes_first_and_reports_what_it_chose(two_variants: Recipe, tmp_path: Path):
    assert cli.main(["reproduce", "mqar", "--preset", "smoke", "--out", str(tmp_path), "--jobs", "1"]) == 0
    folder = tmp_path / "mqar" / "smoke"
    records = read_records(folder / "records.jsonl")
    assert len(records) == 4 + 2
    chosen = best_rates([record for record in records if record.tuning_for is not None], mqar.RECIPE.tuned_by)
    shown = without_tuning_runs(records)
    assert {record.arm: record.options["optimizer"]["learning_rate"] for record in shown} == chosen
    assert {record.seed for record in shown} == {0}
    page = (folder / "report.md").read_text()
    assert "by the accuracy at the end (mean of 3) up to 99 %, then how soon it is reached, from separate" in page
    assert f"({records[0].options['steps']} steps, seeds 1000)" in page
    assert json.loads((folder / "records.jsonl").read_text().splitlines()[0])["tunes"] == {
        "variant": "vanilla",
        "layers": 1,
        "length": 16,
        "width": 8,
    }


def test_runs_that_choose_may_be_the_beginnings_of_longer_ones() -> None:
    (job, *_) = fig01a.RECIPE.jobs("laptop", [1000])
    assert isinstance(job, TrainingJob)
    tuning = tuning_jobs([job], Grid(rates=(1e-3, 2e-3), seeds=(1000,), steps=1500))
    assert [one.arm.label for one in tuning] == [f"{job.arm.label}, rate {rate}" for rate in (0.001, 0.002)]
    for one, rate in zip(tuning, (1e-3, 2e-3), strict=True):
        assert one.config == replace(job.at_rate(rate).config, steps=1500)


def test_a_schedule_that_decays_is_not_cut_short() -> None:
    with pytest.raises(AssertionError, match="another schedule"):
        tuning_jobs(cfg.RECIPE.jobs("laptop", [1000]), Grid(rates=(1e-3,), seeds=(1000,), steps=100))
