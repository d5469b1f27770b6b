"""What a run records of its options, and what the same command without one of them is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.core.errors import LabError
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.resolve import expected_options
from kvshift_lab.run.resume import other_options
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.run.train_task import TaskTrainConfig, task_options
from kvshift_lab.tasks import InductionConfig
from kvshift_lab.variants.model_config import ModelConfig

from ..run_cases import tiny, write_corpus

# An option by its group and name ("" for those of the run), a value, and a setting that must be the same without it.
GIVEN: list[tuple[str, str, Any]] = [
    ("model", "hidden_size", 32),
    ("model", "num_hidden_layers", 3),
    ("model", "vocab_size", 512),
    ("model", "sliding_window", 8),
    ("model", "rope_theta", 500.0),
    ("model", "variant", "canon"),
    ("model", "shift_targets", ()),
    ("model", "shift_targets", ("k",)),
    ("model", "shift_window", 3),
    ("model", "zero_outputs", True),
    ("optimizer", "warmup_steps", 0),
    ("", "eval_rows", 3),
    ("data", "validation", "TEXT"),
    ("data", "periodic", "text"),
]


@pytest.fixture
def config(tmp_path: Path, cache_of_tests: None) -> TrainConfig:
    """A run of 20 steps, of which a tenth is its warm-up."""
    return tiny(write_corpus(tmp_path / "text.jsonl"), tmp_path / "run", steps=20, eval_rows=None)


def with_option(config: TrainConfig, group: str, name: str, value: Any) -> TrainConfig:
    if value == "TEXT":
        value = config.data.corpus
    if group == "":
        return replace(config, **{name: value})
    return replace(config, **{group: replace(getattr(config, group), **{name: value})})


@pytest.mark.parametrize(("group", "name", "value"), GIVEN)
def test_an_option_that_is_left_out_is_named(config: TrainConfig, group: str, name: str, value: Any) -> None:
    recorded = expected_options(with_option(config, group, name, value))
    assert other_options(recorded, expected_options(with_option(config, group, name, value))) == []
    lines = other_options(recorded, expected_options(config))
    if name == "vocab_size":  # the tokenizer's number of tokens is not known yet
        assert lines == []
    else:
        full = f"{group}.{name}" if group else name
        assert [line for line in lines if line.startswith(f"{full}: recorded ")], lines


def test_a_finished_run_refuses_other_options(config: TrainConfig) -> None:
    config = replace(config, steps=1)
    train(replace(config, eval_rows=2, model=replace(config.model, sliding_window=8)))
    with pytest.raises(LabError, match=r"eval_rows: recorded 2, given None\s+model.sliding_window: recorded 8, given"):
        train(config)


def test_expected_options_are_those_that_a_run_records(config: TrainConfig, tmp_path: Path) -> None:
    """Apart from those that data and machine determine."""

    def check(config: TrainConfig) -> None:
        train(config)
        recorded = json.loads(RunFolder(config.out).config.read_text())
        expected = json.loads(json.dumps(expected_options(config)))
        for one in (expected, recorded):
            for name in ("tokens_per_step", "device", "bf16"):
                del one[name]
            del one["model"]["vocab_size"], one["data"]["tokenizer"]
        assert {name: recorded[name] for name in expected} == expected
        train(config)  # finished

    vanilla = replace(config, steps=1, model=replace(config.model, shift_targets=()))
    check(vanilla)
    check(replace(config, steps=1, out=tmp_path / "canon", model=replace(config.model, variant="canon")))
    start = {"steps": 1, "init_from": str(vanilla.out)}
    check(replace(config, **start, out=tmp_path / "plain", model=ModelConfig()))
    shifted = replace(config, **start, out=tmp_path / "shifted", model=ModelConfig(shift_targets=("k", "v")))
    check(shifted)
    with pytest.raises(LabError, match=r"model.shift_targets: recorded \['k', 'v'\], given \[\]"):
        train(replace(shifted, model=ModelConfig()))


def test_a_changed_file_of_the_model_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    """Also in what is no option of ours, such as the epsilon of norms."""
    path = tmp_path / "model.json"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    path.write_text(json.dumps({**sizes, "rms_norm_eps": 1e-6}))
    config = replace(config, steps=1, model=ModelConfig(config=path))
    train(config)
    train(config)
    path.write_text(json.dumps({**sizes, "rms_norm_eps": 0.1}))
    from kvshift_lab.data.files import file_digest

    file_digest.cache_clear()
    with pytest.raises(LabError, match=r"model\.config: recorded content [0-9a-f]{16}, found [0-9a-f]{16}"):
        train(config)


def test_task_options_that_are_left_out_are_named() -> None:
    config = TaskTrainConfig(task=InductionConfig(), steps=100)
    given = replace(config, stop_at=0.9, final_eval_rows=100, eval_batch_size=7, eval_rows=5)
    given = replace(given, optimizer=replace(given.optimizer, warmup_steps=3))
    lines = other_options(task_options(given), task_options(replace(config, eval_rows=None)))
    assert [line.partition(":")[0] for line in lines] == [
        "eval_batch_size", "eval_rows", "final_eval_rows", "optimizer.warmup_steps", "stop_at",
    ]  # fmt: skip
