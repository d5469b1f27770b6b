"""The recipe `phase`: its jobs, when a model counts as changed, and the verdicts on gains by kind of target."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerControl

from kvshift_lab.core.options import to_json
from kvshift_lab.recipes.phase import phase_search
from kvshift_lab.recipes.phase import study as phase
from kvshift_lab.recipes.phase.changes import InductionOnset
from kvshift_lab.recipes.phase.phase_search import LEVEL, SEARCH, StopAtLevel, tokens_per_step, tokens_to_level
from kvshift_lab.study.arm import Arm, pair
from kvshift_lab.study.recipe import Record
from kvshift_lab.training.probes import KINDS
from kvshift_lab.training.train_config import TrainConfig

from ..study.cases import directions, made_up

RECIPE = phase.RECIPE
STEPS = [100 * at for at in range(1, 11)]
LOSSES = ("loss", *(f"loss_{kind}" for kind in KINDS))


def record(
    arm: Arm | str, seed: int, matching: list[float], losses: dict[str, list[float]], config: TrainConfig
) -> Record:
    options = to_json(replace(config, seed=seed)) | {"data_facts": {"tokens": 1024}}
    curve = {"step": STEPS, "prefix_matching": matching, **losses}
    return made_up(arm, seed, curve=curve, options=options, tokens=STEPS[-1] * 4096)


def rising(at: float) -> list[float]:
    """Return a curve of prefix matching that crosses `LEVEL` exactly at step `at`, or never if `at` is infinite."""
    return [0.01 if math.isinf(at) else min(1, max(0, LEVEL + (step - at) / 1000)) for step in STEPS]


def records(
    ours: list[float],
    theirs: list[float],
    gains: list[float],
    *,
    layers: tuple[int, ...] = (1, 2),
    kinds: tuple[float, float, float] = (2.0, 0.5, -0.1),
) -> list[Record]:
    """Return runs of both models in which the change and the gain of the shift are as given, by seed.

    Args:
        ours: Step at which KV-shift changes.
        theirs: Step at which vanilla changes.
        gains: Loss of vanilla minus loss of KV-shift.
        layers: Depths to make runs for.
        kinds: Gain on each kind of target, as a multiple of the gain on all.
    """
    found = []
    for number in layers:
        config = replace(phase.LAPTOP, model=replace(phase.LAPTOP.model, num_hidden_layers=number))
        for seed, (one, other, gain) in enumerate(zip(ours, theirs, gains, strict=True)):
            slope = [4 - step / 1000 + 0.01 * seed for step in STEPS]
            plain = dict.fromkeys(LOSSES, slope)
            parts = dict(zip(LOSSES, (1.0, *kinds), strict=True))
            ours_too = {name: [loss - parts[name] * gain for loss in slope] for name in LOSSES}
            args = ((one, "kv-shift", ours_too), (other, "vanilla", plain))
            for at, variant, losses in args:
                found.append(record(Arm(variant=variant, layers=number), seed, rising(at), losses, config))
    return found


FIVE = [300.0, 310, 320, 330, 340]
LATER = [700.0, 740, 780, 720, 760]
NEVER = [math.inf] * 5
GAINS = [0.10, 0.11, 0.12, 0.13, 0.14]


@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
def test_every_run_is_probed(preset: str):
    jobs = RECIPE.jobs(preset, [0, 7])
    assert len(jobs) == 8
    assert {job.config.probes for job in jobs} == {"induction"}  # type: ignore[attr-defined]


def test_the_search_tries_each_setting_once_and_vanilla_alone():
    jobs = RECIPE.jobs("search", [0])
    assert len({job.arm.label for job in jobs}) == len(jobs) == len(SEARCH)
    for job, setting in zip(jobs, SEARCH, strict=True):
        assert isinstance(job, phase_search.SearchJob)
        job.config.check()
        assert job.config.model.shift_targets == ()
        assert job.config.model.num_hidden_layers == setting.layers
        assert job.config.model.attention_bias in (None, setting.bias)
        assert job.config.eval_every * setting.tokens == 409_600


def test_a_run_of_the_search_ends_at_the_second_evaluation_at_the_level():
    callback, control = StopAtLevel(), TrainerControl()
    for value, ends in [(0.1, False), (0.2, False), (0.19, False), (0.3, False), (0.25, True)]:
        callback.on_evaluate(None, SimpleNamespace(), control, {"eval_prefix_matching": value})
        assert control.should_training_stop is ends


def test_a_job_of_the_search_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(phase_search, "LEVEL", 0.0)
    config = replace(phase.SMOKE, steps=9, eval_every=2, eval_rows=2)
    job = phase_search.SearchJob(arm=Arm(case="a setting"), config=config)
    job.run(tmp_path / "run")
    found = job.record(tmp_path / "run")
    assert found["curve"]["step"] == [2, 4]
    assert len(found["curve"]["prefix_matching"]) == 2
    assert (found["result"]["steps"], found["result"]["tokens"]) == (4, 4 * 2 * 96)
    assert job.is_finished(tmp_path / "run")


def test_when_a_model_changes_is_read_off_between_evaluations():
    one = records([340.0], [math.inf], [0.1], layers=(2,))
    assert tokens_to_level(one[0]) == pytest.approx(340 * tokens_per_step(one[0]))
    assert tokens_to_level(one[1]) is None


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [(LATER, "holds"), (NEVER, "holds"), ([time / 4 for time in LATER], "fails"), ([*NEVER[:4], 200.0], "not shown")],
    ids=str,
)
def test_whether_models_with_the_shift_change_sooner(theirs: list[float], verdict: str):
    found = directions(RECIPE, records(FIVE, theirs, GAINS))
    for layers in ("1 layer", "2 layers"):
        assert found[f"KV-shift, {layers}: a prefix matching of 0.2 sooner than vanilla, {layers}"] == verdict


@pytest.mark.parametrize(
    ("theirs", "gains", "verdict"),
    [
        (LATER, GAINS, "holds"),
        (LATER, [-gain for gain in GAINS], "fails"),
        (LATER, [0.1, -0.1, 0.05, -0.06, 0.01], "not shown"),
        ([*LATER[:4], math.inf], GAINS, "not shown"),  # one model never changes, so nothing is known
    ],
    ids=str,
)
def test_whether_the_gain_survives_the_change_of_plain_attention(theirs, gains, verdict):
    found = directions(RECIPE, records(FIVE, theirs, gains))
    assert found["2 layers: the gain survives plain attention's own change"] == verdict


def test_where_the_gain_is():
    at_end = "2 layers, at the end:"
    larger = f"{at_end} the gain is larger on pairs seen in the row before than on targets that follow a new token"
    plain = f"{at_end} plain attention has the lower loss on targets that follow a new token"
    found = directions(RECIPE, records(FIVE, LATER, GAINS))
    assert (found[larger], found[plain]) == ("holds", "holds")
    found = directions(RECIPE, records(FIVE, LATER, GAINS, kinds=(1.0, 1.0, 3.0)))
    assert (found[larger], found[plain]) == ("fails", "fails")


def test_gains_at_each_moment_are_those_of_a_slow_loop():
    given = records(FIVE, LATER, GAINS)
    changes = InductionOnset(given)
    moments = changes.moments(2)
    assert [*moments] == [
        "half way to KV-shift's change",
        "at KV-shift's change",
        "at vanilla's change",
        "at the end",
    ]
    for name, expected in zip(moments, ([t / 2 for t in FIVE], FIVE, LATER, [1000.0] * 5), strict=True):
        assert [*moments[name].values()] == pytest.approx(expected)
        for loss, part in zip(LOSSES, (1, 2, 0.5, -0.1), strict=True):
            assert changes.gains(2, loss, moments[name]) == pytest.approx([part * gain for gain in GAINS])
    assert "at vanilla's change" not in InductionOnset(records(FIVE, [*LATER[:4], math.inf], GAINS)).moments(1)
    (last,) = [line for line in phase.tables(given).splitlines() if line.startswith("| 2 layers | at the end")]
    assert f"{statistics.fmean(GAINS):+.3f}" in last


def test_the_search_reports_all_that_was_tried():
    larger = phase_search.Setting(256, 4, 1e-3)
    repeated = next(setting for setting in SEARCH if setting.repeated_spans)
    deeper = next(setting for setting in SEARCH if setting.layers == 3)
    tried = (SEARCH[0], SEARCH[1], larger, repeated, deeper)
    times = [400.0, math.inf, 300.0, 100.0, math.inf]
    given = [
        record(setting.label, 0, rising(at), {"loss": [4.0] * 10}, setting.config())
        for setting, at in zip(tried, times, strict=True)
    ]
    claim, of_repeats, of_three = RECIPE.claims(given)
    assert claim.ours.startswith("in 2 of 3 settings; the cheapest is width 64, 2 heads of 32")  # not the larger one
    assert claim.direction == "not shown"  # there is a single seed
    assert of_repeats.statement.endswith("on text with repeated spans")
    assert of_repeats.ours.startswith("in 1 of 1 setting; the cheapest is width 64, 2 heads of 32, BPE 1,024")
    assert of_three.statement.startswith("Three plain layers")
    assert of_three.ours == "in 0 of 1 setting"
    table = phase.tables(given)
    assert all(setting.label in table for setting in tried)
    assert table.count("not reached") == 2
    assert RECIPE.plot(given).axes


def test_the_figure_marks_each_change():
    figure = RECIPE.plot(records(FIVE, [*LATER[:4], math.inf], GAINS))
    assert len(figure.axes) == 4
    for axes in figure.axes:
        upright = [line for line in axes.get_lines() if len({*line.get_xdata()}) == 1 and line.get_linestyle() == ":"]
        assert len(upright) == 2  # one per depth: only with the shift have all seeds changed
        assert {line.get_label() for line in axes.get_lines()} >= {arm.label for n in (1, 2) for arm in pair(layers=n)}
