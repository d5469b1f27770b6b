"""Runs of variants besides KV shift: trained, resumed, evaluated, continued as text, compared, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvshift.models.llama import KVShiftLlamaConfig
from kvshift_lab.cli import main
from kvshift_lab.commands.compare.samples import sample
from kvshift_lab.core.errors import LabError
from kvshift_lab.run.finished import read_run
from kvshift_lab.run.loading import load_trained
from kvshift_lab.run.train import train
from kvshift_lab.run.train_task import TaskTrainConfig, train_task
from kvshift_lab.tasks import MQARConfig
from kvshift_lab.variants.by_name import VARIANTS, find_variant
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.small_gpt2 import GPT2Options, LabGPT2Config

from ..analysis.run_folders import write_run
from ..run_cases import BEFORE_THE_END, assert_same_run, copied, losses, result, tiny, weights

OTHERS = [entry.name for entry in VARIANTS.values() if not entry.shifts and entry.name != "vanilla"]


def sizes_of(name: str) -> list[Any]:
    """Return a small configuration for each model family that the variant supports."""
    sizes = {
        KVShiftLlamaConfig: ModelConfig(hidden_size=16, num_attention_heads=2),
        LabGPT2Config: GPT2Options(width=24, heads=2, head="linear"),
    }
    models: Any = find_variant(name).models
    return [size for family, size in sizes.items() if family in models]


@pytest.fixture(scope="module")
def smeared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smeared") / "run"
    train(tiny(corpus, out, model={"variant": "smear"}, data={"packing": "documents"}))
    return out


def test_a_smeared_run(smeared: Path, vanilla_documents: Path) -> None:
    run = read_run(smeared)
    assert run.name == "smear"
    assert run.config["model"]["variant"] == "smear"
    assert run.config["model"]["shift_targets"] == []
    assert losses(smeared)[0] == losses(vanilla_documents)[0]  # the scale starts at 0
    assert losses(smeared)[-1] != losses(vanilla_documents)[-1]
    assert result(smeared)["parameters"] == result(vanilla_documents)["parameters"] + 13
    assert weights(smeared)["model.smear.scale"].item() != 0


def test_it_resumes_with_the_same_bits(smeared: Path, corpus: Path, tmp_path: Path) -> None:
    run = copied(smeared, tmp_path, without=BEFORE_THE_END)
    train(tiny(corpus, run, model={"variant": "smear"}, data={"packing": "documents"}))
    assert_same_run(run, smeared)
    (run / "result.json").unlink()
    with pytest.raises(LabError, match=r"model\.variant: recorded 'smear', given None"):
        train(tiny(corpus, run, data={"packing": "documents"}))


def test_commands_take_it(smeared: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(smeared / "model")
    assert type(load_trained(read_run(smeared))) is type(model)
    assert main(["generate", str(smeared), "--prompt", "abc", "--max-new-tokens", "9", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("abc")
    assert main(["eval", str(smeared), str(corpus), "--device", "cpu"]) == 0
    texts = sample({"smear": smeared}, prompt="abc", tokens=5, temperature=0.0, seed=0)["texts"]
    assert texts.keys() == {"smear"}


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in OTHERS for size in sizes_of(name)])
def test_tasks_are_learned_with_it(name: str, size: ModelConfig | GPT2Options, tmp_path: Path) -> None:
    task = MQARConfig(length=16, pairs=2, vocab_size=24)
    config = TaskTrainConfig(
        out=tmp_path, task=task, model=replace(size, variant=name), steps=3, batch_size=4, eval_rows=8, device="cpu"
    )
    train_task(config)
    assert read_run(tmp_path).name == VARIANTS[name].label
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    models: Any = find_variant(name).models
    family = KVShiftLlamaConfig if isinstance(size, ModelConfig) else LabGPT2Config
    assert type(loaded) is models[family]
    assert loaded(input_ids=torch.zeros(1, 16, dtype=torch.long)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"variant": "smear"}, r"model\.variant is 'smear', but init_from supports only vanilla and kv-shift"),
        ({"zero_outputs": True}, r"model\.zero_outputs sets initial weights, but init_from .* provides all of them"),
    ],
)
def test_what_does_not_take_it_says_so(model: dict, message: str, corpus: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=message):
        train(tiny(corpus, tmp_path, model={"hidden_size": None, **model}, init_from=str(finished)))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("result.json", None, r"no finished run \(it has no result\.json\)"),
        ("metrics.jsonl", '{"kind":"train"}\n{"kind":\n', r"metrics\.jsonl:2: not a line of JSON"),
        ("metrics.jsonl", None, r"metrics\.jsonl: cannot be read"),
        ("environment.json", "{", r"environment\.json: cannot be read"),
    ],
)
def test_run_folders_that_cannot_be_read(file: str, content: str | None, message: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / file).unlink() if content is None else (run / file).write_text(content)
    with pytest.raises(LabError, match=message):
        read_run(run)


def test_the_last_coefficients_count(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", heads=3, layers=2))
    layers = run.coefficients()
    assert [sorted(layer) for layer in layers] == [["alpha", "beta"]] * 2
    assert layers[1]["alpha"] == [[pytest.approx(0.51 + 0.1 * head), -0.25] for head in range(3)]
    assert read_run(write_run(tmp_path / "vanilla", shift_targets=())).coefficients() == []
