"""Saving and loading, and what other classes make of such a folder."""

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2LMHeadModel, GPT2Model

from kvshift.layers.shift import _warn_rounded
from kvshift.models.retrofit import (
    KVShiftGPT2Config,
    KVShiftGPT2LMHeadModel,
    KVShiftGPT2Model,
    load_kv_shift,
)

from ..llama.checks import logits_of
from ..llama.tiny import random_tokens
from .tiny import SIZES, shifted_gpt2, tiny_gpt2
from .tiny_families import shifted

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "queries too, window 4": {"targets": ("q", "k", "v"), "window": 4},
    "gate": {"constraint": "gate", "init": "uniform"},
    "tied embeddings": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("shift", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_saved_model_is_the_same_bit_for_bit(tmp_path, shift: dict):
    model, ids = shifted_gpt2(**shift), random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    loads = [load_kv_shift, AutoModelForCausalLM.from_pretrained, KVShiftGPT2LMHeadModel.from_pretrained]
    for load in loads:
        loaded, report = load(tmp_path, output_loading_info=True)
        assert type(loaded) is KVShiftGPT2LMHeadModel
        assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert not loaded.training
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=0, atol=0)
        fields = ("shift_targets", "shift_window", "shift_constraint", "shift_init", "n_inner", "layer_types")
        assert [getattr(loaded.config, name) for name in fields] == [getattr(model.config, name) for name in fields]


@pytest.mark.parametrize("family", ["Qwen3", "GPT-2"])
def test_options_of_from_pretrained_reach_the_configuration_too(tmp_path, family: str, monkeypatch):
    model, ids = shifted(family, torch.float32), random_tokens(1, 5)
    model.save_pretrained(tmp_path / "run" / "checkpoint-3")
    loads = [
        load_kv_shift(tmp_path / "run", subfolder="checkpoint-3"),
        load_kv_shift(tmp_path / "run" / "checkpoint-3", config=model.config),
        load_kv_shift(tmp_path / "run" / "checkpoint-3", config=tmp_path / "run" / "checkpoint-3"),
    ]
    assert all(torch.equal(logits_of(loaded, ids), logits_of(model, ids)) for loaded in loads)
    asked: list[dict] = []
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda _, **where: asked.append(where) or model.config)
    options = {"revision": "a", "token": "b", "cache_dir": "c", "local_files_only": True, "force_download": False}
    with pytest.raises(OSError, match="no folder"):
        load_kv_shift(tmp_path / "no folder", dtype=torch.float32, **options)
    assert asked == [options]


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_accelerate_keeps_float32_or_it_is_said(tmp_path, family: str):
    """Its loader puts parameters of the dtype that it is given in the place of those of the model."""
    _warn_rounded.cache_clear()
    model, ids = shifted(family, torch.bfloat16), random_tokens(1, 5)
    assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if ".shift." in name)
    model.save_pretrained(tmp_path)
    expected = logits_of(load_kv_shift(tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"}), ids)
    for dtype in (None, torch.bfloat16):
        with init_empty_weights():
            empty = type(model)._from_config(model.config, dtype=torch.bfloat16).eval()
        loaded = load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"}, dtype=dtype)
        said = (
            pytest.warns(UserWarning, match="coefficients of a KV shift are torch.bfloat16: ")
            if dtype
            else nullcontext()
        )
        with said:
            logits = logits_of(loaded, ids)
        if dtype is None:
            assert torch.equal(logits, expected)


def test_a_decoder_without_a_head(tmp_path):
    model, ids = shifted_gpt2().transformer, random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    for load in (load_kv_shift, AutoModel.from_pretrained):
        loaded = load(tmp_path)
        assert type(loaded) is KVShiftGPT2Model
        assert torch.equal(loaded(ids).last_hidden_state, model(ids).last_hidden_state)


def test_a_loaded_model_is_saved_and_loaded_again(tmp_path):
    model = shifted_gpt2()
    model.save_pretrained(tmp_path / "first")
    load_kv_shift(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert (tmp_path / "first/config.json").read_text() == (tmp_path / "second/config.json").read_text()
    assert torch.equal(load_kv_shift(tmp_path / "second").lm_head.weight, model.lm_head.weight)


def test_names_of_the_parameters_are_those_of_gpt2_and_the_coefficients():
    plain = {name: tensor.shape for name, tensor in tiny_gpt2().state_dict().items()}
    shifted = {name: tensor.shape for name, tensor in shifted_gpt2(targets=("q", "k", "v")).state_dict().items()}
    coefficients = {
        f"transformer.h.{i}.attn.shift.{name}": torch.Size((3, 2))
        for i in range(2)
        for name in ("alpha", "beta", "gamma")
    }
    assert shifted == plain | coefficients


def test_files_name_the_class_and_hold_coefficients_in_float32(tmp_path):
    shifted_gpt2(torch.bfloat16).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["model_type"], fields["architectures"]) == ("kvshift_gpt2", ["KVShiftGPT2LMHeadModel"])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert file.get_tensor(name).dtype == (torch.float32 if ".shift." in name else torch.bfloat16), name
    loaded = load_kv_shift(tmp_path, dtype=torch.bfloat16)
    assert loaded.transformer.h[0].attn.shift.alpha.dtype == torch.float32
    assert loaded.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("plain", [GPT2LMHeadModel, GPT2Model])
def test_gpt2s_own_class_refuses_the_folder_instead_of_leaving_the_shift_out(tmp_path, plain: type):
    shifted_gpt2().save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassFieldValidationError, match=r"kv_shift: load it with .*load_kv_shift"):
        plain.from_pretrained(tmp_path)


def test_a_model_without_targets_is_gpt2_and_its_class_may_load_it(tmp_path):
    model, ids = shifted_gpt2(targets=()), random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(GPT2LMHeadModel.from_pretrained(tmp_path), ids), logits_of(model, ids))


def test_a_folder_of_another_model(tmp_path):
    tiny_gpt2().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no model that add_kv_shift made: its model_type is 'gpt2'"):
        load_kv_shift(tmp_path)


def test_a_folder_of_gpt2_given_coefficients_while_it_is_loaded(tmp_path):
    """The coefficients that no file holds begin as the configuration says."""
    plain, ids = tiny_gpt2(), random_tokens(2, 7)
    plain.save_pretrained(tmp_path)
    config = KVShiftGPT2Config(**SIZES, shift_init="identity")
    model, report = KVShiftGPT2LMHeadModel.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert all(".shift." in name for name in report["missing_keys"])
    assert torch.equal(logits_of(model, ids), logits_of(plain, ids))


def test_auto_classes_build_from_a_configuration():
    config = KVShiftGPT2Config(**SIZES)
    assert type(AutoModelForCausalLM.from_config(config)) is KVShiftGPT2LMHeadModel
    assert type(AutoModel.from_config(config)) is KVShiftGPT2Model
    assert type(AutoConfig.for_model("kvshift_gpt2")) is KVShiftGPT2Config


def test_on_the_meta_device():
    with torch.device("meta"):
        empty = KVShiftGPT2LMHeadModel(KVShiftGPT2Config(**SIZES))
    assert all(parameter.is_meta for parameter in empty.parameters())
    model, ids = shifted_gpt2(), random_tokens(2, 7)
    empty.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(logits_of(empty.eval(), ids), logits_of(model, ids), rtol=0, atol=0)
