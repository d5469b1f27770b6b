"""The recipe `depth`: its jobs, where it looks for text, and its verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.commands.reproduce import reproduce as module
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import to_json
from kvshift_lab.data.config import SHARED_DATA_ENV
from kvshift_lab.recipes.depth import study as depth
from kvshift_lab.recipes.language_models.settings import flops_per_token
from kvshift_lab.study.arm import Arm, pair
from kvshift_lab.study.jobs import with_available_text
from kvshift_lab.study.recipe import Record

from ..study.cases import directions, made_up, ran

RECIPE = depth.RECIPE


def record(layers: int, variant: str, losses: list[float], seed: int = 0) -> Record:
    """Return a run with these losses after 100, 200, ... steps."""
    (job,) = [
        replace(job, config=replace(job.config, model=replace(job.config.model, num_hidden_layers=layers)))
        for job in RECIPE.jobs("laptop", [seed])
        if job.arm == Arm(variant=variant, layers=2)
    ]
    options = to_json(job.config) | {"steps": 100 * len(losses), "data_facts": {"tokens": 1024}}
    curve = {"step": [100 * (at + 1) for at in range(len(losses))], "loss": losses}
    return made_up(Arm(variant=variant, layers=layers).label, seed, curve=curve, options=options)


def records(gains: dict[int, list[float]], *, base: float = 4.0) -> list[Record]:
    """Return runs in which vanilla falls to `base` less 0.1 per layer, and KV-shift is lower by the gain throughout."""
    found = []
    for layers, by_seed in gains.items():
        for seed, gain in enumerate(by_seed):
            end = base - 0.1 * layers + 0.01 * seed
            vanilla = [end + (5 - end) * part for part in (0.75, 0.5, 0.25, 0)]
            found.append(record(layers, "vanilla", vanilla, seed))
            found.append(record(layers, "kv-shift", [loss - gain for loss in vanilla], seed))
    return found


@pytest.mark.parametrize(
    ("gains", "survives"),
    [
        ({2: [0.05, 0.06, 0.07], 8: [0.09, 0.11, 0.12]}, "holds"),
        ({2: [0.09, 0.11, 0.12], 8: [0.01, 0.02, 0.01]}, "fails"),
        ({2: [0.05, 0.06, 0.07], 8: [0.02, 0.10, 0.06]}, "not shown"),
        ({2: [0.05], 8: [0.50]}, "not shown"),
    ],
    ids=str,
)
def test_whether_the_gain_survives_depth(gains: dict[int, list[float]], survives: str):
    found = directions(RECIPE, records(gains))
    assert found["The gain with 8 layers is no smaller than with 2"] == survives
    several = len(gains[2]) > 1
    assert found["After 400 steps, 2 layers with KV shift: a lower loss than 2 without"] == (
        "holds" if several else "not shown"
    )


def test_at_equal_compute_a_deep_model_has_taken_fewer_steps():
    """With eight layers the gain of 0.1 vanishes only at the last step, which lies beyond the compute of two layers."""
    gains = {2: [0.1, 0.11, 0.12], 8: [0.1, 0.11, 0.12]}
    given = records(gains)
    for at, one in enumerate(given):
        if one.arm.label == "KV-shift, 8 layers":
            vanilla = next(o for o in given if (o.arm.label, o.seed) == ("vanilla, 8 layers", one.seed))
            curve = {**one.curve, "loss": [*one.curve["loss"][:-1], vanilla.curve["loss"][-1] + 0.001 * one.seed]}
            given[at] = replace(one, curve=curve)
    found = directions(RECIPE, given)
    assert found["After 400 steps, 8 layers with KV shift: a lower loss than 8 without"] == "not shown"
    assert found["With the compute of 2 layers, 8 layers with KV shift: a lower loss than 8 without"] == "holds"
    assert "With the compute of 2 layers, 2 layers with KV shift: a lower loss than 2 without" not in found


def test_compute_is_read_off_between_evaluations():
    one, deep = record(2, "vanilla", [4.0, 3.0, 2.0]), record(8, "vanilla", [4.0, 3.0, 2.0])
    each = flops_per_token(one)
    assert depth.at_compute(one, 250 * each) == pytest.approx(2.5)
    assert depth.at_compute(one, 300 * each) == depth.at_compute(one, 900 * each) == 2.0
    assert depth.at_compute(one, 10 * each) == 4.0
    # 6 * (4 E^2 + 3 E F) + 12 E (T + 1) / 2 per token and layer, and 6 V E per token for the output head
    flops = {
        layers: 6 * (layers * (4 * 64**2 + 3 * 64 * 192) + 1024 * 64) + layers * 12 * 64 * 64.5 for layers in (2, 8)
    }
    assert (each, flops_per_token(deep)) == (pytest.approx(flops[2]), pytest.approx(flops[8]))


def test_all_questions_are_ours():
    claims = RECIPE.claims(records({1: [0.1, 0.2], 2: [0.1, 0.2], 4: [0.1, 0.2]}))
    assert all(claim.own for claim in claims)
    assert [claim.statement for claim in claims][-2:] == [
        "At equal compute, 1 layer with KV shift: a lower loss than 2 without",
        "At equal compute, 2 layers with KV shift: a lower loss than 4 without",
    ]


def test_the_figure_shows_losses_over_compute_and_gains_over_depth():
    left, right = RECIPE.plot(records({2: [0.1, 0.2], 4: [0.1, 0.2]})).axes
    labels = [arm.label for layers in (2, 4) for arm in pair(layers=layers)]
    assert left.get_legend_handles_labels()[1] == labels
    assert right.get_legend_handles_labels()[1] == [f"equal {what}, 95 % interval" for what in ("steps", "compute")]
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["2", "4"]


@pytest.mark.parametrize("given", [None, ""])
def test_where_no_folder_of_text_is_named_the_bundled_one_stands_for_it(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Jobs on bundled text stay unchanged, and so do all jobs when a folder is named."""
    monkeypatch.delenv(SHARED_DATA_ENV, raising=False)
    if given is not None:
        monkeypatch.setenv(SHARED_DATA_ENV, given)
    started: list[Any] = []

    def stop(work: list[Any], **kwargs: Any):
        started.extend(job for job, _ in work)
        raise RuntimeError("before any run")

    monkeypatch.setattr("kvshift_lab.study.run_study.sweep", stop)
    with pytest.raises(RuntimeError, match="before any run"):
        module.reproduce(module.ReproduceConfig(recipe="depth", out=tmp_path, preset="laptop"))
    assert {(job.config.data.corpus, job.config.data.validation) for job in started} == {("tinyshakespeare", None)}
    assert "the bundled corpus, which is far smaller, is read" in capsys.readouterr().err
    asked = RECIPE.jobs("smoke", [0])
    assert with_available_text(asked) == asked
    monkeypatch.setenv(SHARED_DATA_ENV, str(tmp_path))
    asked = RECIPE.jobs("laptop", [0])
    assert with_available_text(asked) == asked


@pytest.mark.parametrize(("given", "said"), [(None, "not set"), ("", "not set"), ("here", "'.*here', which does not")])
def test_a_text_that_is_not_there_is_asked_for(
    given: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(SHARED_DATA_ENV, raising=False)
    if given is not None:
        monkeypatch.setenv(SHARED_DATA_ENV, given and str(tmp_path / given))
    with pytest.raises(
        LabError, match=rf"{SHARED_DATA_ENV} must name the folder that contains wiki2014-en/train.*it is {said}"
    ):
        RECIPE.jobs("laptop", [0])[0].run(tmp_path / "out")


@pytest.mark.slow
def test_a_run_of_smoke(tmp_path: Path):
    job = RECIPE.jobs("smoke", [3])[-1]
    assert job.arm.label == "vanilla, 1 layer"
    found = ran(job, tmp_path / "run")
    with pytest.raises(LabError, match="contains a run with other options"):
        job.at_rate(0.5).is_finished(tmp_path / "run")
    assert found.curve["step"] == [2, 4]
    assert "eval_losses_per_row" not in found.result
    assert flops_per_token(found) > 0


def test_what_is_kept_of_a_run_is_the_same_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = '{"text": "Of depth and shift there is no end, and no end of text to read of it."}\n' * 40
    kept = []
    for name in ("one", "other"):
        folder = tmp_path / name / "wiki"
        folder.mkdir(parents=True)
        for part in ("train", "valid"):
            (folder / f"{part}.jsonl").write_text(text)
        monkeypatch.setenv(SHARED_DATA_ENV, str(folder.parent))
        job = RECIPE.jobs("smoke", [0])[-1]
        data = replace(job.config.data, corpus="wiki/train.jsonl", validation="wiki/valid.jsonl")
        job = replace(job, config=replace(job.config, data=data))
        job.run(tmp_path / f"run-{name}")
        kept.append(job.record(tmp_path / f"run-{name}"))
    assert kept[0]["options"] == kept[1]["options"]
    assert kept[0]["options"]["data"]["corpus"] == "wiki/train.jsonl"
    assert kept[0]["config_hash"] == kept[1]["config_hash"]
    assert str(tmp_path) not in str([kept[0]["options"], kept[0]["result"], kept[0]["curve"]])
