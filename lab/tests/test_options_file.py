"""`--config FILE`: what a file may hold, what overrides it, and that the record of a run is such a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvshift_lab.commands.compare.options import CompareConfig
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import to_json
from kvshift_lab.data.config import DataConfig
from kvshift_lab.options_file import parse
from kvshift_lab.run.train_config import OptimizerConfig, TrainConfig, config_hash
from kvshift_lab.variants.model_config import ModelConfig

YAML = """
out: runs/mine
steps: 2000
bf16: no            # which YAML takes for false
report_to: []
model:
  hidden_size: 512
  shift_targets: [v]
  rope_theta: 500000
optimizer:
  learning_rate: 1e-3   # which YAML takes for text
  schedule: cosine
data:
  corpus: texts/
  sequence_length: 512
"""


def write(tmp_path: Path, text: str, name: str = "options.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def read(options: type, path: Path, *arguments: str):
    return parse(options, ["--config", str(path), *arguments])


def test_one_file_for_two_commands(tmp_path):
    path = write(tmp_path, YAML)
    expected = TrainConfig(
        out=Path("runs/mine"),
        steps=2000,
        bf16="no",
        report_to=(),
        model=ModelConfig(hidden_size=512, shift_targets=("v",), rope_theta=5e5),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="cosine"),
        data=DataConfig(corpus="texts/", sequence_length=512),
    )
    assert read(TrainConfig, path) == expected
    assert read(CompareConfig, path) == CompareConfig(train=expected)


def test_the_command_line_stands_above_the_file(tmp_path):
    path = write(tmp_path, YAML)
    config = parse(TrainConfig, ["--steps", "7", f"--config={path}", "--model.shift-targets", "--out", "other"])
    assert config == replace(
        read(TrainConfig, path), steps=7, out=Path("other"), model=ModelConfig(**{**_model(path), "shift_targets": ()})
    )


def _model(path: Path) -> dict:
    return vars(read(TrainConfig, path).model)


def test_what_the_file_leaves_open_is_the_default(tmp_path):
    path = write(tmp_path, "steps: 7\n")
    assert read(TrainConfig, path, "--out", "x") == TrainConfig(out=Path("x"), steps=7)
    assert read(CompareConfig, path).train == replace(CompareConfig().train, steps=7)
    assert read(CompareConfig, write(tmp_path, "seeds: 2\n")).train.steps == 400
    assert parse(TrainConfig, ["--out", "x"]) == TrainConfig(out=Path("x"))


def test_a_quoted_null_or_true_is_text(tmp_path):
    for text in ("null", "true"):
        path = write(tmp_path, f'data: {{corpus: "{text}"}}\n')
        assert read(TrainConfig, path, "--out", "x").data.corpus == text


def test_out_must_be_said_somewhere(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        read(TrainConfig, write(tmp_path, "steps: 7\n"))
    assert left.value.code == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(out=Path("x"), init_from="runs/a", tokens_per_step=4096, progress=False),
        TrainConfig(
            out=Path("x"),
            model=ModelConfig(shift_targets=(), config=Path("m.json"), freeze_shift=True, tie_word_embeddings=False),
            data=DataConfig(packing="documents", streaming=True, tokenizer="gpt2"),
            optimizer=OptimizerConfig(warmup_steps=0, epsilon=1e-9),
        ),
    ],
)
def test_a_record_gives_the_same_options(tmp_path, config):
    record = {**to_json(config), "config_hash": "0123456789abcdef", "data_facts": {"tokens": 7}}
    path = write(tmp_path, json.dumps(record), "config.json")
    assert read(TrainConfig, path) == config
    assert read(TrainConfig, path, "--out", "y") == replace(config, out=Path("y"))
    assert read(CompareConfig, path, "--out", "y") == CompareConfig(train=replace(config, out=Path("y")))


def test_a_run_in_the_repository_can_be_repeated():
    for variant in ("vanilla", "kvshift"):
        path = Path(__file__).parents[2] / "results" / "compare" / "seed-10" / variant / "config.json"
        assert config_hash(to_json(read(TrainConfig, path))) == json.loads(path.read_text())["config_hash"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tune: lora", "has an unknown field tune; "),
        ("step: 7", "has an unknown field step; did you mean steps?"),
        ("seeds: 3", "has an unknown field seeds; did you mean seed?"),
        ("model: {hiden_size: 7}", r"has an unknown field model\.hiden_size; did you mean model\.hidden_size?"),
        ("7: 7", "has an unknown field 7; known: "),
        ("model: small", "has an unknown field model; "),
        ("steps: {many: 7}", r"has an unknown field steps\.many; "),
        ("- steps", "must map options to values, got list"),
        ("", "must map options to values, got NoneType"),
        ("compile: 1", "compile must be true or false, got 1"),
        ("a: [", "cannot be read: while parsing"),
    ],
)
def test_what_is_no_option_is_named(tmp_path, text, said):
    with pytest.raises(LabError, match=rf"config: .*options\.yaml.* {said}"):
        read(TrainConfig, write(tmp_path, text), "--out", "x")


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("steps: many", "--steps"),
        ("steps: 1.5", "--steps"),
        ("steps: true", "--steps"),
        ("steps: null", "--steps"),
        ("eval_rows: x", "--eval-rows"),
        ("optimizer: {schedule: linear}", "--optimizer.schedule"),
        ("optimizer: {learning_rate: high}", "--optimizer.learning-rate"),
        ("model: {shift_targets: [k, w]}", "--model.shift-targets"),
        ("model: {tie_word_embeddings: 7}", "--model.tie-word-embeddings"),
    ],
)
def test_a_wrong_value_is_refused_as_on_the_command_line(tmp_path, capsys, text, option):
    with pytest.raises(SystemExit) as left:
        read(TrainConfig, write(tmp_path, text), "--out", "x")
    assert left.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 10\nsteps: 20", r"options\.yaml cannot be read: steps is given twice"),
        ("data: {corpus: a, corpus: b}", "corpus is given twice"),
        ("data.corpus: a\ndata: {corpus: b}", r"options\.yaml: data\.corpus is given twice"),
    ],
)
def test_a_name_that_is_given_twice_is_refused(tmp_path, text, message):
    with pytest.raises(LabError, match=message):
        read(TrainConfig, write(tmp_path, text), "--out", "x")


def test_false_is_not_the_number_0(tmp_path, capsys):
    with pytest.raises(SystemExit):
        read(TrainConfig, write(tmp_path, "seed: false"), "--out", "x")
    assert "--seed" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(LabError, match=r"config: absent\.json cannot be read"):
        read(TrainConfig, Path("absent.json"))
    with pytest.raises(LabError, match=r"config: .*cut\.json cannot be read: "):
        read(TrainConfig, write(tmp_path, '{"steps": ', "cut.json"))
