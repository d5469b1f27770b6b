"""Saving and loading: bit for bit, under names that do not change."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, LlamaModel

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM, KVShiftLlamaModel

from .checks import ATOL, logits_of
from .tiny import random_tokens, tiny_config, tiny_model

VARIANTS = {
    "paper": {},
    "queries too, window 4": {"shift_targets": ["q", "k", "v"], "shift_window": 4, "qk_norm": True},
    "gate": {"shift_constraint": "gate"},
    "sliding window": {"sliding_window": 5},
    "tied embeddings": {"tie_word_embeddings": True},
    "no shift": {"shift_targets": []},
}

# Parameters and shapes of the model below. To change one is to break every checkpoint: it needs a migration.
NAMES = {
    "model.embed_tokens.weight": (61, 42),
    "model.layers.0.input_layernorm.weight": (42,),
    "model.layers.0.mlp.down_proj.weight": (42, 29),
    "model.layers.0.mlp.gate_proj.weight": (29, 42),
    "model.layers.0.mlp.up_proj.weight": (29, 42),
    "model.layers.0.post_attention_layernorm.weight": (42,),
    "model.layers.0.self_attn.k_norm.weight": (10,),
    "model.layers.0.self_attn.k_proj.bias": (30,),
    "model.layers.0.self_attn.k_proj.weight": (30, 42),
    "model.layers.0.self_attn.o_proj.bias": (42,),
    "model.layers.0.self_attn.o_proj.weight": (42, 60),
    "model.layers.0.self_attn.q_norm.weight": (10,),
    "model.layers.0.self_attn.q_proj.bias": (60,),
    "model.layers.0.self_attn.q_proj.weight": (60, 42),
    "model.layers.0.self_attn.shift.alpha": (3, 4),
    "model.layers.0.self_attn.shift.beta": (3, 4),
    "model.layers.0.self_attn.shift.gamma": (6, 4),
    "model.layers.0.self_attn.v_proj.bias": (30,),
    "model.layers.0.self_attn.v_proj.weight": (30, 42),
    "model.norm.weight": (42,),
    "lm_head.weight": (61, 42),
}


def test_names_of_the_parameters_are_frozen():
    model = tiny_model(num_hidden_layers=1, shift_targets=["q", "k", "v"], shift_window=4, qk_norm=True)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == NAMES


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"alpha": (3, 2), "beta": (3, 2)}),
        ({"shift_targets": ["v"], "shift_window": 3}, {"beta": (3, 3)}),
        ({"shift_targets": ["q"]}, {"gamma": (6, 2)}),
        ({"shift_constraint": "gate"}, {"alpha": (3, 1), "beta": (3, 1)}),
        ({"shift_targets": []}, {}),
    ],
    ids=str,
)
def test_names_of_the_coefficients_are_frozen(options: dict, names: dict):
    prefix = "model.layers.1.self_attn.shift."
    shapes = {
        name.removeprefix(prefix): tuple(tensor.shape)
        for name, tensor in tiny_model(**options).state_dict().items()
        if name.startswith(prefix)
    }
    assert shapes == names


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_saved_model_is_the_same_bit_for_bit(tmp_path, options: dict):
    model, ids = tiny_model(**options), random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*model*")] == ["model.safetensors"]
    for load in (KVShiftLlamaForCausalLM, AutoModelForCausalLM):
        loaded, report = load.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is KVShiftLlamaForCausalLM
        assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert not loaded.training
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=0, atol=0)


def test_auto_model_loads_the_base_model(tmp_path):
    model, ids = tiny_model(), random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is KVShiftLlamaModel
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
        torch.testing.assert_close(base(ids).last_hidden_state, expected, rtol=0, atol=0)


def test_auto_classes_build_from_a_configuration():
    assert type(AutoModelForCausalLM.from_config(tiny_config())) is KVShiftLlamaForCausalLM
    assert type(AutoModel.from_config(tiny_config())) is KVShiftLlamaModel


@pytest.mark.parametrize("plain", [LlamaForCausalLM, LlamaModel])
def test_llamas_own_class_refuses_the_folder_instead_of_leaving_the_shift_out(tmp_path, plain: type):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassFieldValidationError, match=r"kv_shift: load it with .*KVShiftLlamaForCausalLM"):
        plain.from_pretrained(tmp_path)


def test_a_model_without_targets_is_llama_and_its_class_may_load_it(tmp_path):
    model, ids = tiny_model(shift_targets=[]), random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        logits_of(LlamaForCausalLM.from_pretrained(tmp_path), ids), logits_of(model, ids), rtol=0, atol=ATOL
    )


def test_the_mark_of_a_saved_configuration_stays_out_of_the_loaded_one(tmp_path):
    """Folders from before there was a mark are read as they were, and fields may be changed as they are loaded."""
    tiny_config(use_cache=False).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    marked = json.loads(path.read_text())
    config = KVShiftLlamaConfig.from_pretrained(tmp_path, num_hidden_layers=5)
    assert config.layer_types == ["hybrid"] * 5
    assert KVShiftLlamaConfig.from_pretrained(tmp_path, shift_targets=[]).layer_types == ["full_attention"] * 2
    assert config.use_cache is False
    path.write_text(json.dumps(marked | {"use_cache": False}))
    assert KVShiftLlamaConfig.from_pretrained(tmp_path).to_diff_dict() == config.from_dict(marked).to_diff_dict()


def test_files_name_the_class_and_hold_coefficients_in_float32(tmp_path):
    tiny_model(torch.bfloat16).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["model_type"], fields["architectures"]) == ("kvshift_llama", ["KVShiftLlamaForCausalLM"])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert file.get_tensor(name).dtype == (torch.float32 if ".shift." in name else torch.bfloat16), name


def test_tied_embeddings_are_saved_once(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = KVShiftLlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_checkpoint_in_several_files(tmp_path):
    model = tiny_model(shift_targets=["q", "k", "v"])
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = KVShiftLlamaForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_checkpoint_of_other_targets_says_what_is_missing(tmp_path):
    tiny_model(shift_targets=["k"]).save_pretrained(tmp_path)
    config = tiny_config(shift_targets=["v"], shift_init="identity")
    loaded, report = KVShiftLlamaForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert set(report["missing_keys"]) == {f"model.layers.{i}.self_attn.shift.beta" for i in range(2)}
    assert set(report["unexpected_keys"]) == {f"model.layers.{i}.self_attn.shift.alpha" for i in range(2)}
    assert loaded.model.layers[0].self_attn.shift.beta.tolist() == [[1.0, 0.0]] * 3


def test_a_model_on_the_meta_device_costs_nothing_and_can_be_filled():
    with torch.device("meta"):
        empty = KVShiftLlamaForCausalLM(tiny_config())
    assert all(parameter.is_meta for parameter in empty.parameters())
    model, ids = tiny_model(), random_tokens(2, 7)
    assert {n: t.shape for n, t in empty.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}
    big = KVShiftLlamaConfig(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40)
    with torch.device("meta"):
        assert KVShiftLlamaForCausalLM(big).num_parameters() > 1e10
    filled = KVShiftLlamaForCausalLM(tiny_config())
    filled.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(logits_of(filled, ids), logits_of(model, ids), rtol=0, atol=0)
