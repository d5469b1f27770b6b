"""The recipe `retrofit`: its jobs, its measurements and its verdicts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvshift_lab.cli import main
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import to_json
from kvshift_lab.data.config import SHARED_DATA_ENV
from kvshift_lab.recipes.retrofit import study as retrofit
from kvshift_lab.recipes.retrofit.retrofit_claims import ALL, BOTH, CONTROL, LORA, NOTHING
from kvshift_lab.recipes.retrofit.study import PARTS, RetrofitJob
from kvshift_lab.study.jobs import Computation, TextJob
from kvshift_lab.study.recipe import Record, without_tuning_runs
from kvshift_lab.study.records import read_records
from kvshift_lab.study.tuning import tuning_jobs

from ..study.cases import directions, made_up

RECIPE = retrofit.RECIPE
FLAT = {NOTHING: 3.2, ALL: 3.2, CONTROL: 3.2, LORA: 3.2, BOTH: 3.2}


def records(
    losses: dict[str, float],
    *,
    noise: float = 0.001,
    early: float = 0.0,
    repeats: dict[str, float] | None = None,
    spread: float = 0.001,
) -> list[Record]:
    """Return three seeds of each part and one untrained model, with these losses on both texts.

    Args:
        noise: Largest deviation of a seed's loss.
        early: How much higher the loss of `ALL` is at the first evaluation, relative to the other parts.
        repeats: Losses in the second half of repeated sequences.
        spread: Largest deviation of a model's loss on a sequence, which makes differences of models vary.
    """
    found = []
    for label, loss in losses.items():
        for seed in range(1 if label == NOTHING else 3):
            draw = Random(f"{label} {seed}")
            moved = loss + (0 if label == NOTHING else draw.uniform(-noise, noise))
            own = Random(label)
            rows = [moved + at / 10 + own.uniform(-spread, spread) for at in range(20)]
            first = moved + (early + (seed - 1) / 1000 if label == ALL else 0) + 0.1
            curve = {"step": [24, 96], "loss": [first, moved]}
            measured = {
                "losses": {"wiki2014-en": rows, "classic-books": rows},
                "repeated": {"loss": (repeats or FLAT)[label] + draw.uniform(-noise, noise), "accuracy": 0.6},
                "induction": 0.7 - (repeats or FLAT)[label] / 100 + draw.uniform(-noise, noise) / 100,
            }
            options = {"steps": 96}
            found.append(made_up(label, seed, curve=curve, options=options, tokens=98_304, **measured))
    return found


def lower(one: str, other: str, text: str = "wiki2014-en") -> str:
    return f"After 98,304 tokens, {one}: a lower loss on {text} than with {other}"


def test_all_parts_see_the_same_and_differ_in_what_is_trained():
    jobs = [job for job in RECIPE.jobs("laptop", [0, 1, 2]) if isinstance(job, RetrofitJob)]
    assert len(jobs) == 3 * 4
    for job in jobs:
        job.config.check()
        twin = next(one for one in jobs if (one.seed, one.arm.label) == (job.seed, ALL))
        assert replace(job.config, tune="shift") == twin.config
        assert job.held_out == twin.held_out
        assert job.config.tune == PARTS[job.arm.label]


def test_rates_are_chosen_on_other_sequences_by_shorter_runs():
    preset = RECIPE.presets["laptop"]
    assert preset.grid is not None
    jobs = tuning_jobs(RECIPE.jobs("laptop", preset.grid.seeds), preset.grid)
    assert len(jobs) == len(PARTS) * len(preset.grid.rates)
    size = retrofit.SIZES["laptop"]
    assert size.config.eval_rows == size.held_out.begin, "what a rate is chosen by is left out of what is reported"
    for job in jobs:
        assert isinstance(job, RetrofitJob)
        assert (job.held_out, job.config.steps, job.config.eval_every) == (None, 24, 24)


def test_the_longer_runs_go_on_where_those_of_the_laptop_end():
    laptop, longer = (
        {(job.arm.label, job.seed): job for job in RECIPE.jobs(preset, [0, 1, 2])} for preset in ("laptop", "longer")
    )
    assert set(longer) < set(laptop)
    for run, job in longer.items():
        if isinstance(job, RetrofitJob):
            before = laptop[run]
            assert isinstance(before, RetrofitJob)
            assert job.config.eval_every == before.config.steps
            assert job.held_out == before.held_out


def test_a_preset_of_two_parts_says_what_can_be_said_of_them():
    two = records({NOTHING: 3.2, ALL: 3.16, CONTROL: 3.18})
    found = directions(RECIPE, two)
    assert found[lower(ALL, CONTROL)] == "holds"
    assert not [statement for statement in found if "LoRA" in statement]
    assert RECIPE.tables is not None
    assert "LoRA" not in RECIPE.tables(two)


@pytest.mark.parametrize("preset", RECIPE.presets)
def test_the_untrained_model_is_measured_once_on_the_same(preset: str):
    jobs = RECIPE.jobs(preset, [0, 1])
    (untrained,) = [job for job in jobs if isinstance(job, Computation)]
    trained = jobs[0]
    assert isinstance(trained, RetrofitJob)
    assert untrained.config.held_out == trained.held_out
    assert to_json(untrained.config)["config"]["init_from"] == trained.config.init_from


def test_a_gain_beyond_the_control_is_said_as_one():
    found = directions(RECIPE, records({**FLAT, ALL: 3.16, CONTROL: 3.18, LORA: 3.1, BOTH: 3.08}))
    for text in ("wiki2014-en", "classic-books"):
        assert found[lower(ALL, NOTHING, text)] == "holds"
        assert found[lower(ALL, CONTROL, text)] == "holds"
        assert found[lower(BOTH, LORA, text)] == "holds"
        assert found[lower(ALL, LORA, text)] == "fails"


def test_a_gain_that_the_control_has_too_is_not_that_of_the_lags():
    found = directions(RECIPE, records({**FLAT, ALL: 3.18, CONTROL: 3.18}))
    assert found[lower(ALL, NOTHING)] == found[lower(CONTROL, NOTHING)] == "holds"
    assert found[lower(ALL, CONTROL)] == "not shown"


def test_what_all_seeds_agree_on_and_sequences_do_not_is_not_shown():
    """Every seed gains 0.01, but the gain varies between sequences by about 1."""
    found = directions(RECIPE, records({**FLAT, ALL: 3.19}, spread=1.0))
    assert found[lower(ALL, NOTHING)] == "not shown"


@pytest.mark.parametrize(("early", "expected"), [(0.02, "holds"), (-0.02, "fails"), (0.0, "not shown")])
def test_whether_the_gain_lasts(early: float, expected: str):
    found = directions(RECIPE, records({**FLAT, ALL: 3.16, CONTROL: 3.18}, early=early))
    assert found["The lags add no less to the current token after 98,304 tokens than after 24,576"] == expected


def test_copying():
    found = directions(RECIPE, records(FLAT, repeats={**FLAT, ALL: 2.5, BOTH: 3.9}))
    statement = "On repeated random tokens, {}: a lower loss in the second half than with {}"
    assert found[statement.format(ALL, NOTHING)] == found[statement.format(ALL, CONTROL)] == "holds"
    assert found[statement.format(BOTH, LORA)] == "fails"
    statement = "The best induction heads score higher with {} than with {}"
    assert found[statement.format(ALL, CONTROL)] == "holds"
    assert found[statement.format(BOTH, LORA)] == "fails"


def test_the_table_has_a_line_for_each_part():
    assert RECIPE.tables is not None
    lines = RECIPE.tables(records({**FLAT, ALL: 3.16})).splitlines()
    assert [line.split("|")[1].strip() for line in lines[-5:]] == [NOTHING, *PARTS]
    assert "3.2000" not in lines[-4]


def test_a_record_says_the_same_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = RECIPE.jobs("laptop", [0])[0]
    assert isinstance(job, RetrofitJob)
    with pytest.raises(LabError, match=r"contains a finished run, but no measured\.json"):
        job.record(tmp_path)
    (tmp_path / "measured.json").write_text('{"induction": 0.5}')
    found = []
    for home in ("/home/a", "/home/b"):
        options = to_json(job.config) | {"init_from": f"{home}/smollm2", "data_facts": {"tokens": 49_152}}
        options["data"] |= {"tokenizer": home}
        record = {"options": options, "config_hash": home, "result": {"steps": 96}}
        monkeypatch.setattr(TextJob, "record", lambda self, out, record=record: record)
        found.append(job.record(tmp_path))
    assert found[0] == found[1]
    assert found[0]["options"]["init_from"] == retrofit.SMOLLM2
    assert found[0]["result"] == {"steps": 96, "induction": 0.5}
    assert job.other_options(found[0]["options"]) == []


def test_without_the_model_or_the_text_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    command = ["reproduce", "retrofit", "--preset", "laptop", "--out", str(tmp_path / "out")]
    texts = tmp_path / "texts"
    for text in ("wiki2014-en/train-00.jsonl.xz", "wiki2014-en/valid.jsonl.xz", "classic-books/valid.jsonl.xz"):
        (texts / text).parent.mkdir(parents=True, exist_ok=True)
        (texts / text).touch()
    for folder, message in (
        ("", "the environment variable KVSHIFT_SHARED_DATA must name the folder that contains wiki2014-en/train-00"),
        (str(texts), "smollm2-135m-instruct: `make smollm` downloads and converts it"),
    ):
        monkeypatch.setenv(SHARED_DATA_ENV, folder)
        assert main(command) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_command_resumes_and_measures_what_was_not(tmp_path: Path):
    command = ["reproduce", "retrofit", "--preset", "smoke", "--out", str(tmp_path), "--jobs", "1"]
    assert main(command) == 0
    folder = tmp_path / "retrofit" / "smoke"
    before = without_tuning_runs(read_records(folder / "records.jsonl"))
    assert {record.arm.label for record in before} == {NOTHING, *PARTS}
    run = folder / "lora" / "seed-0"
    assert not (run / "model").exists()
    shutil.rmtree(run / "checkpoint-8")
    for name in ("result.json", "measured.json"):  # as if killed during training
        (run / name).unlink()
    assert main(command) == 0
    after = without_tuning_runs(read_records(folder / "records.jsonl"))
    for one, other in zip(before, after, strict=True):
        assert (one.arm.label, one.curve) == (other.arm.label, other.curve)
        assert one.result["losses"] == other.result["losses"]
