"""A run that starts from a model: its weights, tokenizer and shape; options that contradict them are named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvshift import KVShift
from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift.models.retrofit import add_kv_shift, load_kv_shift
from kvshift_lab.core.errors import LabError
from kvshift_lab.data.packing import collate
from kvshift_lab.data.text import load_text_data
from kvshift_lab.run.pretrained import base_config, find_pretrained
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.variants.model_config import ModelConfig

from ..run_cases import assert_same_run, metrics, result, tiny


def tuned(corpus: Path, out: Path, source: Path | str, model: dict | None = None, **changes) -> TrainConfig:
    """Return options for 4 steps from `source`, without options for its shape."""
    config = tiny(corpus, out, **{"steps": 4, "init_from": str(source), **changes})
    return replace(config, model=ModelConfig(**(model or {})))


def still(config: TrainConfig) -> TrainConfig:
    """Return the same options with a learning rate at which no weight moves."""
    return replace(config, optimizer=replace(config.optimizer, learning_rate=1e-30, weight_decay=0.0))


def assert_resumes(config: TrainConfig) -> None:
    """Assert that a finished run of 4 steps, repeated without its last checkpoint, resumes from the one before."""
    whole = Path(shutil.copytree(config.out, config.out.with_name("whole")))
    (config.out / "result.json").unlink()
    shutil.rmtree(config.out / "checkpoint-4")
    train(config)
    assert_same_run(config.out, whole)


@pytest.fixture(scope="module")
def plain(finished: Path, tmp_path_factory) -> Path:
    """The folder of a Llama without shift, saved in bfloat16, with the tokenizer of the finished run."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        tie_word_embeddings=True,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    )
    folder = tmp_path_factory.mktemp("plain") / "llama"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in (finished / "tokenizer").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_a_run_starts_where_the_other_ended(finished, corpus, tmp_path):
    train(still(tuned(corpus, tmp_path / "run", finished)))
    assert result(tmp_path / "run")["eval_losses_per_row"] == result(finished)["eval_losses_per_row"]
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["init_from"] == str(finished)
    assert recorded["model"] == json.loads((finished / "config.json").read_text())["model"]
    assert recorded["data"]["tokenizer"] == str(finished / "model")
    read_again = load_text_data(
        replace(tiny(corpus, finished).data, tokenizer=recorded["data"]["tokenizer"]),
        seed=0,
        tokenizer_folder=tmp_path / "run" / "tokenizer",
    )
    assert len(read_again.tokenizer) == 281


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ({}, []),
        ({"shift_targets": ("k", "v")}, ["k", "v"]),
        ({"shift_targets": ("q", "v"), "shift_window": 3, "shift_constraint": "clamp"}, ["q", "v"]),
    ],
    ids=str,
)
def test_a_llama_computes_what_it_did(plain, corpus, tmp_path, model, targets):
    """This holds whatever shift is added. The model's own configuration counts, and its weights become float32."""
    train(still(tuned(corpus, tmp_path / "run", plain, model)))
    trained = KVShiftLlamaForCausalLM.from_pretrained(tmp_path / "run" / "model", shift_targets=targets)
    assert (trained.config.rms_norm_eps, trained.config.vocab_size) == (1e-4, 300)
    assert trained.config.rope_parameters["factor"] == 2.0
    original = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for name, tensor in original.state_dict().items():
        assert torch.equal(trained.state_dict()[name], tensor), name
    assert trained.dtype == torch.float32
    data = load_text_data(
        replace(tiny(corpus, plain).data, tokenizer=str(plain)),
        seed=0,
        tokenizer_folder=tmp_path / "run" / "tokenizer",
    )
    with torch.no_grad():
        loss = original(**collate([data.validation[3]])).loss.item()
    assert result(tmp_path / "run")["eval_losses_per_row"][3] == pytest.approx(loss, rel=1e-5)
    assert (result(tmp_path / "run")["shift_parameters"] > 0) == bool(targets)


def test_the_shift_that_is_added_learns_or_is_frozen(plain, corpus, tmp_path):
    targets = {"shift_targets": ("k", "v")}
    train(tuned(corpus, tmp_path / "free", plain, targets))
    train(tuned(corpus, tmp_path / "frozen", plain, {**targets, "freeze_shift": True}))
    identity = [[1.0, 0.0], [1.0, 0.0]]
    assert metrics(tmp_path / "free", "coefficients")[-1]["alpha"] != identity
    assert metrics(tmp_path / "frozen", "coefficients")[-1]["alpha"] == identity


FAMILIES = {
    "gpt2": {"n_embd": 24, "n_inner": 40, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "qwen2": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt_neox": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2},
}


@pytest.mark.parametrize(
    "model_type", [x if x == "gpt2" else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES]
)
def test_what_retrofit_made_of_another_family(model_type, finished, corpus, tmp_path):
    fields = {**FAMILIES[model_type], "vocab_size": 300, "tie_word_embeddings": model_type == "gpt2"}
    if model_type == "qwen2":
        fields["num_key_value_heads"] = 1
    model = add_kv_shift(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)))
    source = tmp_path / "source"
    model.save_pretrained(source)
    for file in (finished / "tokenizer").glob("tokenizer*"):
        shutil.copy(file, source)

    config = tuned(corpus, tmp_path / "run", source, save_every=2)
    train(config)
    trained = load_kv_shift(tmp_path / "run" / "model")
    assert type(trained) is type(model)
    first = next(module for module in trained.modules() if isinstance(module, KVShift))
    assert (first.alpha - torch.tensor([1.0, 0.0])).abs().max() > 1e-4
    assert len(metrics(tmp_path / "run", "coefficients")[-1]["alpha"]) == first.alpha.shape[0]
    assert result(tmp_path / "run")["shift_parameters"] == 4 * 2 * first.alpha.shape[0]
    assert_resumes(config)

    with pytest.raises(LabError, match=r"model\.num_hidden_layers is 1, .* is used unchanged"):
        train(tuned(corpus, tmp_path / "other", source, {"num_hidden_layers": 1}))
    if model_type == "gpt2":
        long = tuned(corpus, tmp_path / "other", source)
        with pytest.raises(LabError, match=r"data\.sequence_length is 65, but .* has 64 positions"):
            train(replace(long, data=replace(long.data, sequence_length=65)))


def test_another_model_under_the_same_name_is_refused(finished, corpus, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(finished / "model", source)
    config = tuned(corpus, tmp_path / "run", source)
    train(config)
    (tmp_path / "run" / "result.json").unlink()
    model = KVShiftLlamaForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    model.save_pretrained(source)
    with pytest.raises(LabError, match="init_from: recorded content"):
        train(config)


def base_of(source: Path, **model) -> dict:
    return base_config(find_pretrained(str(source), print), ModelConfig(**model))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"hidden_size": 32}, r"model\.hidden_size is 32, but the model of init_from \(.*\) has 24"),
        ({"shift_window": 3}, r"model\.shift_window is 3, but the model of init_from \(.*\) has 2"),
        ({"shift_targets": ()}, r"model\.shift_targets is \(\), but the model of init_from \(.*\) has \('k', 'v'\)"),
        ({"shift_init": "identity"}, r"model\.shift_init is 'identity', but the model of init_from .* has 'uniform'"),
        ({"rope_theta": 5.0}, r"model\.rope_theta is 5\.0, but the model of init_from \(.*\) has 10000\.0"),
        ({"sliding_window": 8}, r"model\.sliding_window is 8, but the model of init_from \(.*\) has None"),
        ({"size": "1.5B"}, r"model\.size \(1\.5B\) and init_from \(.*\) cannot both be given"),
        ({"config": Path("m.json")}, r"model\.config \(m\.json\) and init_from \(.*\) cannot both be given"),
        ({"qk_norm": True}, r"model\.qk_norm is True, but the model of init_from \(.*\) has False"),
    ],
    ids=str,
)
def test_options_that_contradict_the_model_are_named(finished, model, said):
    with pytest.raises(LabError, match=said):
        base_of(finished, **model)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"shift_init": "identity"}, r"model\.shift_init is 'identity'.* has no shift: give model\.shift_targets"),
        ({"shift_targets": ("v",), "shift_init": "uniform"}, r"model\.shift_init is 'uniform'.*expected identity"),
        ({"shift_targets": ("v",), "shift_constraint": "gate"}, r"model\.shift_constraint is 'gate'.*expected free or"),
    ],
    ids=str,
)
def test_a_shift_that_a_llama_cannot_start_with(plain, model, said):
    with pytest.raises(LabError, match=said):
        base_of(plain, **model)


def test_options_that_agree_with_the_model_may_be_given(finished, plain):
    """A recorded config.json contains such options."""
    same = {"hidden_size": 24, "num_attention_heads": 2, "shift_targets": ("k", "v"), "vocab_size": 281}
    assert base_of(finished, **same) == base_of(finished)
    vanilla = {"shift_targets": (), "shift_window": 2, "shift_init": "uniform", "rope_theta": 500.0}
    assert base_of(plain, **vanilla) == base_of(plain)
    assert base_of(plain)["shift_targets"] == []


def test_another_tokenizer_is_refused(finished, corpus, tmp_path):
    config = tuned(corpus, tmp_path / "run", finished)
    with pytest.raises(LabError, match=r"data\.tokenizer is 'gpt2', but the model of init_from \(.*\) has its own"):
        train(replace(config, data=replace(config.data, tokenizer="gpt2", vocab_size=1024)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "other has model_type 'mistral'; expected llama, kvshift_llama"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "other is quantized"),
        ({"num_hidden_layers": 3}, r"other lacks \d+ weights, such as model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"other has \d+ weights that Llama does not have, such as model\.layers\.1"),
        ({"hidden_act": 7}, "the configuration of .*other cannot be read"),
    ],
)
def test_what_is_no_llama_is_named(plain, corpus, tmp_path, change, message):
    other = shutil.copytree(plain, tmp_path / "other")
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(LabError, match=f"init_from: .*{message}"):
        train(tuned(corpus, tmp_path / "run", other))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_model_that_is_not_there_is_named(corpus, tmp_path):
    with pytest.raises(LabError, match=r"init_from: there is no folder .*absent/model"):
        train(tuned(corpus, tmp_path / "run", tmp_path / "absent" / "model"))


def test_weights_that_are_not_finite_are_named(plain, corpus, tmp_path):
    diverged = shutil.copytree(plain, tmp_path / "diverged")
    model = LlamaForCausalLM.from_pretrained(diverged)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    model.save_pretrained(diverged)
    with pytest.raises(LabError, match=r"init_from: .*diverged: model\.norm\.weight has numbers that are not finite"):
        train(tuned(corpus, tmp_path / "run", diverged))
    assert not (tmp_path / "run" / "config.json").exists()
