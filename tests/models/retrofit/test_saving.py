"""Saving and loading of retrofitted models, also through accelerate and from folders of plain models."""

from contextlib import nullcontext

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvshift.layers.shift import _warn_rounded
from kvshift.models.retrofit import (
    KVShiftGPT2Config,
    KVShiftGPT2LMHeadModel,
    add_kv_shift,
    load_kv_shift,
)

from ..llama.checks import logits_of
from ..llama.tiny import random_tokens
from .tiny_families import shifted, shifted_gpt2, stock


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
    """accelerate's loader replaces the model's parameters by parameters of the dtype that it is given."""
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


def test_a_loaded_model_is_saved_and_loaded_again(tmp_path):
    model = shifted_gpt2()
    model.save_pretrained(tmp_path / "first")
    load_kv_shift(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert (tmp_path / "first/config.json").read_text() == (tmp_path / "second/config.json").read_text()
    assert torch.equal(load_kv_shift(tmp_path / "second").lm_head.weight, model.lm_head.weight)


def test_a_folder_of_another_model(tmp_path):
    stock("GPT-2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is not a model with a shift from add_kv_shift: its model_type is 'gpt2'"):
        load_kv_shift(tmp_path)


def test_a_folder_of_gpt2_given_coefficients_while_it_is_loaded(tmp_path):
    """Coefficients that no file contains start as the configuration says."""
    plain, ids = stock("GPT-2"), random_tokens(2, 7)
    plain.save_pretrained(tmp_path)
    config = KVShiftGPT2Config.from_pretrained(tmp_path, shift_init="identity")
    model, report = KVShiftGPT2LMHeadModel.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert all(".shift." in name for name in report["missing_keys"])
    assert torch.equal(logits_of(model, ids), logits_of(plain, ids))


def test_gpt_neox_from_a_folder_with_the_earlier_name_of_its_head(tmp_path):
    """Transformers renames the weight on loading, and back on saving, by the name of the class."""
    plain = stock("GPT-NeoX")
    plain.save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    weights = {name.replace("lm_head.", "embed_out."): tensor for name, tensor in load_file(file).items()}
    assert "embed_out.weight" in weights
    save_file(weights, file, metadata={"format": "pt"})
    add_kv_shift(type(plain).from_pretrained(tmp_path / "plain")).save_pretrained(tmp_path / "shifted")
    loaded = load_kv_shift(tmp_path / "shifted")
    assert torch.equal(loaded.lm_head.weight, plain.lm_head.weight)
    weights = load_file(tmp_path / "shifted" / "model.safetensors")
    assert "lm_head.weight" not in weights
    torch.nn.init.zeros_(loaded.lm_head.weight)
    torch.nn.ModuleDict({"inner": loaded}).load_state_dict({f"inner.{name}": x for name, x in weights.items()})
    assert torch.equal(loaded.lm_head.weight, plain.lm_head.weight)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"embed_out\.weight"'):  # the head under both its names
        loaded.load_state_dict({**weights, "lm_head.weight": weights["embed_out.weight"]})
