"""What `kvshift generate` and `kvshift plan` make of a run that `kvshift train` made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from kvshift.cli import main
from kvshift.lab.data.tokenizers import load_tokenizer
from kvshift.lab.plan.plan_config import PlanConfig, PlanData
from kvshift.lab.plan.planning import estimate
from kvshift.lab.runs.model_files import locate
from kvshift.models.llama import KVShiftLlamaForCausalLM

from ..run_cases import LENGTH, tiny


def continued(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    arguments = ["--prompt", "abc", "--max-new-tokens", "20", "--temperature", "0"]
    assert main(["generate", str(run), *arguments]) == 0
    return capsys.readouterr().out


def test_generate_from_a_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(finished / "tokenizer")
    ids = torch.tensor([tokenizer("abc")["input_ids"]])
    model = KVShiftLlamaForCausalLM.from_pretrained(finished / "model")
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, use_cache=True)
    assert continued(finished, capsys) == tokenizer.decode(expected[0], skip_special_tokens=True) + "\n"


def test_generate_from_the_last_checkpoint_of_a_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the last step it is the final model."""
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "model")
    assert locate(str(run), lambda note: None)[0] == str(run / "checkpoint-12")
    assert continued(run, capsys) == continued(finished, capsys)


def test_plan_knows_the_parameters_of_a_run(finished: Path, corpus: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    from_file = PlanConfig(model=tiny(corpus, finished, model={"config": finished / "model" / "config.json"}).model)
    for config in (PlanConfig(model=tiny(corpus, finished).model, data=PlanData(sequence_length=LENGTH)), from_file):
        (row,) = estimate(config)
        vocabulary = json.loads((finished / "model" / "config.json").read_text())["vocab_size"]
        spare = 2 * 24 * (1024 - vocabulary) if config is not from_file else 0  # the run's tokenizer is smaller
        assert row.parameters.total - spare == result["parameters"]
        assert row.parameters.shift == result["shift_parameters"]
