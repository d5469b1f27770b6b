"""A vanilla twin is saved as a plain Llama, which programs load that have never heard of this package."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvshift.cli import main
from kvshift.lab.compare.samples import sample
from kvshift.lab.compare.step_time import measure_step_time
from kvshift.lab.data.packing import collate
from kvshift.lab.data.text import load_text_data
from kvshift.lab.runs.checkpoints import seal, size_fault
from kvshift.lab.runs.loading import load_trained, load_weights
from kvshift.lab.runs.run import read_run
from kvshift.lab.training.head_scores import measure_heads
from kvshift.lab.training.repeat_config import RepeatConfig
from kvshift.lab.training.train import train
from kvshift.models.llama import KVShiftLlamaForCausalLM

from ..run_cases import assert_same_run, result, tiny

VANILLA = {"shift_targets": ()}
OURS = {"qk_norm": False, "shift_targets": [], "shift_window": 2, "sliding_window": None}


@pytest.fixture(scope="module")
def vanilla(vanilla_documents: Path) -> Path:
    return vanilla_documents


def described(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def as_before(folder: Path) -> None:
    """What a version of this package that knew no plain Llama wrote."""
    values = described(folder) | OURS | {"model_type": "kvshift_llama", "architectures": ["KVShiftLlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values))


def test_model_and_checkpoints_are_plain_llama(vanilla: Path) -> None:
    known = {field.name for field in fields(LlamaConfig)} | {"model_type", "transformers_version"}
    for folder in (vanilla / "model", vanilla / "checkpoint-8", vanilla / "checkpoint-12"):
        values = described(folder)
        assert (values["model_type"], values["architectures"]) == ("llama", ["LlamaForCausalLM"])
        assert values.keys() <= known
        model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert type(model) is LlamaForCausalLM
        assert not any(loading.values())
        assert folder.name == "model" or size_fault(folder) is None


def test_transformers_own_llama_has_the_losses_of_the_run(vanilla: Path, corpus: Path) -> None:
    """Documents apart, by their position_ids, as long as it is told to keep no cache."""
    model = AutoModelForCausalLM.from_pretrained(vanilla / "model").eval()
    config = tiny(corpus, vanilla, data={"packing": "documents"}).data
    rows = load_text_data(config, seed=0, tokenizer_folder=vanilla / "tokenizer").validation
    expected = result(vanilla)["eval_losses_per_row"]
    together = []
    for number, loss in enumerate(expected):
        batch = collate([rows[number]])
        with torch.no_grad():
            assert model(**batch, use_cache=False).loss.item() == pytest.approx(loss, abs=1e-6)
            together.append(abs(model(**batch).loss.item() - loss) > 1e-4)
    assert any(together)  # a cache makes it forget where documents begin


@pytest.mark.parametrize("model", [{}, VANILLA | {"qk_norm": True}, VANILLA | {"sliding_window": 11}], ids=str)
def test_what_is_no_plain_llama_keeps_its_name(model: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    train(tiny(corpus, tmp_path, model=model, steps=1))
    for folder in (tmp_path / "model", tmp_path / "checkpoint-1"):
        assert described(folder)["model_type"] == "kvshift_llama"
        assert type(AutoModelForCausalLM.from_pretrained(folder)) is KVShiftLlamaForCausalLM


def test_a_run_of_before_is_resumed(vanilla: Path, corpus: Path, tmp_path: Path) -> None:
    run = shutil.copytree(vanilla, tmp_path / "run", ignore=shutil.ignore_patterns("model", "result.json", "*-12"))
    as_before(run / "checkpoint-8")
    seal(run / "checkpoint-8")
    train(tiny(corpus, run, model=VANILLA, data={"packing": "documents"}))
    assert described(run / "model")["model_type"] == "llama"
    assert_same_run(run, vanilla)


def test_runs_of_before_and_of_now_are_read_alike(
    vanilla: Path,
    finished: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what compares two runs, which takes both as the class that was trained."""
    monkeypatch.setattr("kvshift.lab.compare.step_time._LEAST_SECONDS", 1e-9)
    before = shutil.copytree(vanilla, tmp_path / "before")
    as_before(before / "model")
    options: Any = {"prompt": "abc", "tokens": 7, "temperature": 0.0, "seed": 3}
    texts = []
    for run in (vanilla, before):
        model = load_trained(read_run(run))
        assert type(model) is KVShiftLlamaForCausalLM
        assert model.config.shift_targets == []
        assert "model of type" not in caplog.text
        texts.append(sample({"vanilla": run, "kvshift": finished}, **options))
        assert measure_step_time({"vanilla": run, "kv-shift": finished}, 0)["rounds"] == 5
    assert texts[0] == texts[1]
    assert texts[0]["texts"].keys() == {"vanilla", "KV-shift"}


def test_generate_and_analyze_take_it(vanilla: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = shutil.copytree(vanilla, tmp_path / "before")
    as_before(before / "model")
    found = []
    for run in (vanilla, before):
        assert main(["generate", str(run), "--prompt", "abc", "--max-new-tokens", "9", "--temperature", "0"]) == 0
        model = load_weights(run / "model", attn_implementation="eager")
        found.append((capsys.readouterr().out, measure_heads(model, RepeatConfig(rows=3, length=7))))
    assert found[0] == found[1]
