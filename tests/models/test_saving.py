"""Saving and loading keep every bit, under names that do not change."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.models.retrofit import load_kv_shift
from kvshift.models.versions import CACHE

from .llama.checks import ATOL, logits_of, new_tokens_of
from .llama.tiny import random_tokens, tiny_config, tiny_model
from .registry import MODELS, RETROFITTED
from .retrofit.tiny_families import FAMILIES, shifted, shifted_gpt2, stock

# Models whose saving and loading are tested: those of the registry, and some more.
SHIFT = {"targets": ("q", "k", "v"), "window": 3, "constraint": "clamp"}
ALL: dict[str, Callable[..., PreTrainedModel]] = {
    **MODELS,
    "Llama, gate": partial(tiny_model, shift_constraint="gate"),
    "Llama, tied embeddings": partial(tiny_model, tie_word_embeddings=True),
    "GPT-2, tied embeddings": partial(shifted_gpt2, tie_word_embeddings=True),
    **{f"{family}, {SHIFT}": partial(shifted, family, shift=SHIFT) for family in FAMILIES},
    **{f"{family}, classes": partial(shifted, family, shift=SHIFT, classifies=True) for family in FAMILIES},
}
WITHOUT_SHIFT = {"Llama": (tiny_model, {"shift_targets": []}), "GPT-2": (shifted_gpt2, {"targets": ()})}
FIELDS = ("shift_targets", "shift_window", "shift_constraint", "shift_init", "layer_types", "num_labels", "n_inner")


def stock_classes(model: PreTrainedModel) -> list[Any]:
    """Return transformers' own classes of the model and of its decoder."""
    family = getattr(type(model), "family", None)
    both = type(model), type(model.base_model)
    return [] if family is None else [plain for plain, own in family.models.items() if own in both]


@pytest.mark.parametrize("name", ALL)
def test_a_saved_model_is_the_same_bit_for_bit(tmp_path, name: str):
    model, ids = ALL[name](torch.float32), random_tokens(1, 7)
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*model*")] == ["model.safetensors"]
    auto = AutoModelForCausalLM if model.can_generate() else AutoModelForSequenceClassification
    loads = [type(model).from_pretrained, auto.from_pretrained]
    if model.config.model_type != "baichuan_m1":
        loads.append(load_kv_shift)
    for load in loads:
        loaded, report = load(tmp_path, output_loading_info=True)
        assert type(loaded) is type(model)
        assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert not loaded.training
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key], tensor, rtol=0, atol=0)
        torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=0, atol=0)
        assert [getattr(loaded.config, field, None) for field in FIELDS] == [
            getattr(model.config, field, None) for field in FIELDS
        ]
    if model.config.shift_targets:  # transformers' own class would drop the shift
        for plain in stock_classes(model):
            with pytest.raises(StrictDataclassFieldValidationError, match=r"kv_shift: load it with kvshift\.models"):
                plain.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", [*MODELS, *RETROFITTED])
def test_a_decoder_without_a_head(tmp_path, name: str):
    model, ids = (MODELS | RETROFITTED)[name](torch.float32), random_tokens(1, 7)
    model.save_pretrained(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "alone")
    for folder in ("whole", "alone"):
        loaded = AutoModel.from_pretrained(tmp_path / folder)
        assert type(loaded) is type(model.base_model)
        assert torch.equal(loaded(ids).last_hidden_state, model.base_model(ids).last_hidden_state)
        assert AutoConfig.from_pretrained(tmp_path / folder).model_type == model.config.model_type


@pytest.mark.parametrize("name", MODELS)
def test_auto_classes_build_from_a_configuration(name: str):
    model = MODELS[name]()
    assert type(AutoModelForCausalLM.from_config(model.config)) is type(model)
    assert type(AutoModel.from_config(model.config)) is type(model.base_model)


@pytest.mark.parametrize("name", WITHOUT_SHIFT)
def test_a_model_without_targets_may_be_loaded_by_its_class_of_transformers(tmp_path, name: str):
    build, options = WITHOUT_SHIFT[name]
    model, ids = build(**options), random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    plain = next(plain for plain in stock_classes(model) if plain.can_generate())
    torch.testing.assert_close(
        logits_of(plain.from_pretrained(tmp_path), ids), logits_of(model, ids), rtol=0, atol=ATOL
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_files_name_the_class_and_hold_coefficients_in_float32(tmp_path, name: str, dtype: torch.dtype):
    model = MODELS[name](dtype)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["model_type"], fields["architectures"]) == (model.config.model_type, [type(model).__name__])
    saved = load_file(tmp_path / "model.safetensors")
    for key, tensor in saved.items():
        assert tensor.dtype == (torch.float32 if ".shift." in key else dtype), key
    for wanted in (torch.bfloat16, "bfloat16", "auto"):
        loaded = load_kv_shift(tmp_path, dtype=wanted).state_dict()
        for key, tensor in saved.items():
            kept = ".shift." in key or wanted == "auto"
            assert loaded[key].dtype == (tensor.dtype if kept else torch.bfloat16), key
            assert torch.equal(loaded[key], tensor.to(loaded[key].dtype)), key


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_a_model_on_the_meta_device_costs_nothing_and_can_be_filled(name: str):
    model, ids = MODELS[name](), random_tokens(2, 7)
    with torch.device("meta"):
        empty = type(model)(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert {n: t.shape for n, t in empty.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}
    empty.load_state_dict(model.state_dict(), assign=True)
    if name == "GPT-2":  # Llama's rotary angles are buffers that no state dict holds
        torch.testing.assert_close(logits_of(empty.eval(), ids), logits_of(model, ids), rtol=0, atol=0)
    filled = type(model)(model.config).eval()
    filled.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(logits_of(filled, ids), logits_of(model, ids), rtol=0, atol=0)
    big = KVShiftLlamaConfig(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40)
    with torch.device("meta"):
        assert KVShiftLlamaForCausalLM(big).num_parameters() > 1e10


def test_names_of_the_parameters_are_those_of_gpt2_and_the_coefficients():
    plain = {name: tensor.shape for name, tensor in stock("GPT-2").state_dict().items()}
    shifted = {name: tensor.shape for name, tensor in shifted_gpt2(targets=("q", "k", "v")).state_dict().items()}
    coefficients = {
        f"transformer.h.{i}.attn.shift.{name}": torch.Size((4, 2))
        for i in range(2)
        for name in ("alpha", "beta", "gamma")
    }
    assert shifted == plain | coefficients


# Parameters and shapes of the model below. Changing one breaks every checkpoint and needs a migration.
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


def test_the_mark_of_a_saved_configuration_stays_out_of_the_loaded_one(tmp_path):
    """Folders written without the mark load as before, and fields can be changed while loading."""
    tiny_config(use_cache=False).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    marked = json.loads(path.read_text())
    config = KVShiftLlamaConfig.from_pretrained(tmp_path, num_hidden_layers=5)
    assert config.layer_types == ["hybrid"] * 5
    assert KVShiftLlamaConfig.from_pretrained(tmp_path, shift_targets=[]).layer_types == ["full_attention"] * 2
    assert config.use_cache is False
    path.write_text(json.dumps(marked | {"use_cache": False}))
    assert KVShiftLlamaConfig.from_pretrained(tmp_path).to_diff_dict() == config.from_dict(marked).to_diff_dict()


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_folder_without_generation_settings_keeps_use_cache(tmp_path, use_cache):
    """Transformers then reads them from the saved configuration, where a mark takes the place of `use_cache`."""
    tiny_model(use_cache=use_cache).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generation_config.use_cache is use_cache
    found = model.generate(random_tokens(1, 5), max_new_tokens=2, return_dict_in_generate=True)
    assert (found.get(CACHE) is not None) is use_cache


@pytest.mark.parametrize("name", MODELS)
def test_layers_on_disk(tmp_path, name):
    model, ids = MODELS[name](), random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    layers = next(path for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList))
    tensors = [*model.state_dict(), *dict(model.named_buffers())]
    places = {tensor.rpartition(".")[0]: "cpu" for tensor in tensors if not tensor.startswith(layers)}
    places |= {
        f"{layers}.{number}": "disk" if number % 2 else "cpu" for number in range(len(model.get_submodule(layers)))
    }
    loaded = type(model).from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "off")
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=0, atol=0)
    assert torch.equal(new_tokens_of(loaded, ids), new_tokens_of(model, ids))


def test_tied_embeddings_are_saved_once(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = KVShiftLlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_checkpoint_of_other_targets_says_what_is_missing(tmp_path):
    tiny_model(shift_targets=["k"]).save_pretrained(tmp_path)
    config = tiny_config(shift_targets=["v"], shift_init="identity")
    loaded, report = KVShiftLlamaForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert set(report["missing_keys"]) == {f"model.layers.{i}.self_attn.shift.beta" for i in range(2)}
    assert set(report["unexpected_keys"]) == {f"model.layers.{i}.self_attn.shift.alpha" for i in range(2)}
    assert loaded.model.layers[0].self_attn.shift.beta.tolist() == [[1.0, 0.0]] * 3
