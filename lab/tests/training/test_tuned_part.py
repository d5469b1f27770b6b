"""`tune`: one part of the model is trained and saved in checkpoints; everything else is unchanged to the bit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.models.retrofit import add_kv_shift
from kvshift_lab.core.errors import LabError, install_command
from kvshift_lab.training import tuned_part
from kvshift_lab.training.train import train
from kvshift_lab.training.train_config import OptimizerConfig, TrainConfig
from kvshift_lab.training.tuned_part import merge_lora, tune_part
from kvshift_lab.variants.model_config import ModelConfig

from ..run_cases import assert_same_bits, assert_same_run, copied, result, tiny, weights

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
PARTS = ("shift", "current", "lora", "shift+lora")
every_part = pytest.mark.parametrize("part", PARTS)


@pytest.fixture(scope="module")
def source(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with two layers and an identity shift, trained for two steps."""
    out = tmp_path_factory.mktemp("source") / "run"
    model = {"shift_init": "identity", "freeze_shift": True}
    train(tiny(corpus, out, model=model, steps=2))
    return out


def config_of(corpus: Path, out: Path, source: Path, part: str, **changes: Any) -> TrainConfig:
    config = tiny(corpus, out, init_from=str(source), tune=part, **{"steps": 8, **changes})
    return replace(config, model=ModelConfig(), optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=0.0))


@pytest.fixture(scope="module")
def runs(corpus: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the finished runs, by part."""
    folder = tmp_path_factory.mktemp("runs")
    for part in PARTS:
        train(config_of(corpus, folder / part, source, part))
    return {part: folder / part for part in PARTS}


def is_of(part: str, name: str) -> bool:
    shift = part != "lora" and ".shift." in name
    return shift or ("lora" in part and any(f"{projection}.weight" in name for projection in PROJECTIONS))


@every_part
def test_what_is_trained(part: str, runs: dict[str, Path], source: Path):
    before, after = weights(source), weights(runs[part])
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if is_of(part, name)}
    lags = [after[name][:, 1] for name in after if ".shift." in name]
    assert len(lags) == 2 * 2
    if part == "current":
        assert all(torch.equal(lag, torch.zeros_like(lag)) for lag in lags)
    elif "shift" in part:
        assert all((lag != 0).all() for lag in lags)


def test_numbers_that_are_trained(runs: dict[str, Path]):
    """With two layers of two heads of 12, LoRA of rank 8 has 8 * (24 + 24) numbers in each of four projections."""
    trained = {part: result(out)["trained_parameters"] for part, out in runs.items()}
    assert trained == {"shift": 16, "current": 16, "lora": 2 * 4 * 8 * 48, "shift+lora": 2 * 4 * 8 * 48 + 16}


@every_part
def test_a_checkpoint_holds_the_part_alone(part: str, runs: dict[str, Path]):
    kept = load_file(runs[part] / "checkpoint-4" / "model.safetensors")
    shift = {name for name in kept if ".shift." in name}
    assert len(shift) == (0 if part == "lora" else 4)
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in kept.keys() - shift} == (
        set(PROJECTIONS) if "lora" in part else set()
    )


@every_part
def test_a_run_that_was_killed_resumes_to_the_same_bits(
    part: str, runs: dict[str, Path], corpus: Path, source: Path, tmp_path: Path
):
    out = copied(runs[part], tmp_path, without=("result.json", "model", "checkpoint-8"))
    train(config_of(corpus, out, source, part))
    assert_same_run(out, runs[part])


def test_lora_starts_alike_with_the_coefficients_and_without():
    found = []
    for part in ("lora", "shift+lora"):
        model = small_model()
        tune_part(model, part, rank=3, seed=5)
        found.append({name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name})
    assert_same_bits(found[0], found[1])
    assert len(found[0]) == 2 * 2 * 4
    other = small_model()
    tune_part(other, "lora", rank=3, seed=6)
    assert not all(torch.equal(other.state_dict()[name], tensor) for name, tensor in found[0].items())


def small_model(**options: Any) -> KVShiftLlamaForCausalLM:
    torch.manual_seed(0)
    config = KVShiftLlamaConfig(
        vocab_size=31, hidden_size=20, intermediate_size=22, num_hidden_layers=2, num_attention_heads=5, **options
    )
    return KVShiftLlamaForCausalLM(config).double().eval()


def assert_merging_keeps_outputs(model: Any, ids: Tensor, before: Tensor) -> None:
    """Assert that LoRA with another B changes the logits `before`, and that merging it keeps the changed logits."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.normal_()
    beside = model(ids).logits
    assert (beside - before).abs().max() > 0.01
    merge_lora(model)
    torch.testing.assert_close(model(ids).logits, beside)


@torch.no_grad()
def test_merged_lora_computes_what_it_did_beside_the_weights():
    model, ids = small_model(), torch.arange(22).view(2, 11)
    names, before = model.state_dict().keys(), model(ids).logits
    tune_part(model, "lora", rank=3, seed=0)
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)
    assert_merging_keeps_outputs(model, ids, before)
    assert model.state_dict().keys() == names


@torch.no_grad()
def test_lora_of_gpt2_is_in_its_attention_alone():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=31, n_positions=11, n_embd=20, n_layer=2, n_head=5)
    model = add_kv_shift(GPT2LMHeadModel(config)).double().eval()
    ids = torch.arange(22).view(2, 11)
    before = model(ids).logits
    tune_part(model, "lora", rank=3, seed=0)
    added = {name.rpartition(".lora_")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert added == {f"transformer.h.{layer}.attn.{name}" for layer in (0, 1) for name in ("c_attn", "c_proj")}
    assert_merging_keeps_outputs(model, ids, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 4}, "lora_rank is 4, but tune is 'shift'; expected lora or shift\\+lora"),
        ({"lora_rank": 0, "tune": "lora"}, "lora_rank must be 1 or more, or None, got 0"),
        ({"model": ModelConfig(freeze_shift=True)}, "freeze_shift has no effect with tune"),
    ],
)
def test_options_that_contradict_each_other(changes: dict, message: str):
    with pytest.raises(LabError, match=message):
        replace(TrainConfig(out=Path("run"), tune="shift"), **changes).check()


def test_parts_that_a_model_does_not_have(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(LabError, match="tune is 'shift', but the model has no shift; expected lora"):
        tune_part(small_model(shift_targets=[]), "shift", rank=None, seed=0)
    with pytest.raises(LabError, match="tune is 'current', but with the constraint gate"):
        tune_part(small_model(shift_constraint="gate"), "current", rank=None, seed=0)
    monkeypatch.setattr(tuned_part, "is_peft_available", lambda: False)
    with pytest.raises(LabError, match=re.escape(install_command("peft"))):
        tune_part(small_model(), "lora", rank=None, seed=0)
