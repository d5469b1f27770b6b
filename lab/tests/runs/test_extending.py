"""More steps in the folder of a run: equal to a longer run where the schedule permits, otherwise only on request."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvshift_lab.core.errors import LabError
from kvshift_lab.runs.extending import has_same_schedule
from kvshift_lab.training.train import train
from kvshift_lab.training.train_config import config_hash

from ..run_cases import BEFORE_THE_END, assert_same_bits, copied, metrics, result, tiny, weights


def options_of(out: Path) -> dict:
    return json.loads((out / "config.json").read_text())


def at(config, **optimizer):
    return replace(config, optimizer=replace(config.optimizer, **optimizer))


@pytest.fixture(scope="module")
def longer(corpus: Path, tmp_path_factory) -> Path:
    """A run of 20 steps in one go, with the one warm-up step that 12 steps have by default."""
    out = tmp_path_factory.mktemp("longer") / "run"
    train(at(tiny(corpus, out, steps=20), warmup_steps=1))
    return out


def test_a_finished_run_is_extended_to_the_bits_of_a_longer_one(finished, longer, corpus, tmp_path, capfd):
    out = copied(finished, tmp_path, without=())
    train(tiny(corpus, out, steps=20))
    assert "checkpoint-12" in capfd.readouterr().err
    assert_same_bits(weights(out), weights(longer))
    assert metrics(out, "train") == metrics(longer, "train")
    assert result(out) == result(longer)
    assert options_of(out) | {"out": ""} == options_of(longer) | {"out": ""}
    # The extended run has one evaluation more than the longer run, at its earlier end.
    evaluations = metrics(out, "eval")
    assert [line["step"] for line in evaluations] == [5, 10, 12, 15, 20]
    assert [line for line in evaluations if line["step"] != 12] == metrics(longer, "eval")
    # Repeating the command finds the run finished; the shorter command is another run.
    train(tiny(corpus, out, steps=20))
    assert "finished" in capfd.readouterr().err
    with pytest.raises(LabError, match="steps: recorded 20, given 12"):
        train(tiny(corpus, out))


def test_an_interrupted_run_is_extended_before_its_end(finished, longer, corpus, tmp_path):
    out = copied(finished, tmp_path, without=BEFORE_THE_END)
    train(tiny(corpus, out, steps=20))
    assert_same_bits(weights(out), weights(longer))
    assert metrics(out, "eval") == metrics(longer, "eval")


def test_a_schedule_that_ends_with_the_run_is_extended_when_asked(corpus, tmp_path, capfd):
    config = at(tiny(corpus, tmp_path / "run", steps=8), schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    train(config)
    recorded = options_of(config.out)
    said = r"started with 8 steps; with 16, its schedule \(cosine\) would have had other learning rates before step 8"
    with pytest.raises(LabError, match=said):
        train(replace(config, steps=16))
    assert options_of(config.out) == recorded
    assert (config.out / "result.json").exists()

    train(replace(config, steps=16, extend=True))
    whole = replace(config, out=tmp_path / "whole", steps=16)
    train(whole)
    rates, others = ([line["learning_rate"] for line in metrics(each.out, "train")] for each in (config, whole))
    assert rates[8:] == others[8:]
    assert rates[4:8] != others[4:8]
    extended = options_of(config.out)
    assert extended["extended"] == [{"after_step": 8, "begun_with_steps": 8}]
    assert "extend" not in extended
    assert extended["config_hash"] != options_of(whole.out)["config_hash"]
    assert result(config.out)["config_hash"] == extended["config_hash"]
    capfd.readouterr()
    train(replace(config, steps=16))  # the same command need not ask again
    assert "finished" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("optimizer", "done", "same"),
    [
        ({"schedule": "constant", "warmup_steps": 30}, 300, True),
        ({"schedule": "cosine", "warmup_steps": 30}, 30, True),
        ({"schedule": "cosine", "warmup_steps": 30}, 31, False),
        ({"schedule": "wsd", "warmup_steps": 30, "decay_fraction": 0.2}, 240, True),
        ({"schedule": "wsd", "warmup_steps": 30, "decay_fraction": 0.2}, 241, False),
        ({"schedule": "wsd", "warmup_steps": 30, "decay_fraction": 0.2}, 0, True),
    ],
)
def test_same_schedule(optimizer, done, same):
    assert has_same_schedule(optimizer, 300, done) is same


def test_without_a_checkpoint_a_finished_run_is_not_begun_anew(finished, corpus, tmp_path):
    out = copied(finished, tmp_path, without=())
    for folder in out.glob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(LabError, match="has finished its 12 steps and has no complete checkpoint"):
        train(tiny(corpus, out, steps=20))
    assert (out / "result.json").exists()


def test_other_options_are_still_refused(finished, corpus, tmp_path):
    out = copied(finished, tmp_path, without=())
    with pytest.raises(LabError, match="batch_size: recorded 4, given 2"):
        train(tiny(corpus, out, steps=20, batch_size=2))
    with pytest.raises(LabError, match=r"optimizer\.warmup_steps: recorded 1, given 2"):
        train(at(tiny(corpus, out, steps=20), warmup_steps=2))
    assert (out / "result.json").exists()


def test_the_digits_of_earlier_runs_stay():
    options, late = {"out": "x", "steps": 7, "seed": 0}, {"init_from": None, "tune": None, "lora_rank": None}
    assert config_hash(options) == config_hash({**options, **late, "out": "y"}) == "5702dfe71094e1a8"
    of_text, spans, other = (
        config_hash({**options, "data": {"vocab_size": 300, **data}})
        for data in ({}, {"repeated_spans": None}, {"repeated_spans": 0.5})
    )
    assert of_text == spans != other
