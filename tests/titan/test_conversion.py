"""A model of torchtitan and its folder of transformers have the same logits, or the conversion is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.models.retrofit.families import QWEN3

from .conversions import EXPORTED, LLAMA, LOADED, NOT_LOADED, REFUSED, Change, each, qk_norm, shift, unchanged
from .on_cpu import SDPA
from .tiny import packed_rows, tiny_trainer_config

from torchtitan.config.override import derive  # isort: skip  # after on_cpu
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

from kvshift.integrations.titan.hf_export import export_checkpoint


def changed_config(family: str, change: Change) -> Any:
    config = tiny_trainer_config("", family=family, dtype="float32")
    change(config.model_spec.model)
    return config


def drawn_state(config: Any) -> dict[str, Tensor]:
    """Return random weights of the model, none of which is 0 or 1."""
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in config.model_spec.model.build().state_dict().items()}
    rng = torch.Generator().manual_seed(3)
    state = {}
    for name, shape in shapes.items():
        middle = 0.5 if ".shift." in name else float("norm" in name)
        state[name] = middle + 0.3 * torch.randn(shape, generator=rng)
    if config.model_spec.model.enable_weight_tying:
        state["tok_embeddings.weight"] = state["lm_head.weight"]
    return state


@torch.no_grad()
def titan_logits(config: Any, state: dict[str, Tensor]) -> Tensor:
    """Return the logits of packed rows, computed by torchtitan's model with SDPA."""
    for layer in config.model_spec.model.layers:
        if type(layer.attention.inner_attention) is VarlenAttention.Config:
            layer.attention.inner_attention = FlexAttention.Config()
        if type(layer.attention.inner_attention) is FlexAttention.Config:
            layer.attention.inner_attention = derive(layer.attention.inner_attention, SDPA.Config)
    model = config.model_spec.model.build()
    model.load_state_dict(dict(state))
    tokens, _, positions = packed_rows(5)
    return model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))


@torch.no_grad()
def assert_same_logits(model: Any, config: Any, state: dict[str, Tensor]) -> None:
    tokens, _, positions = packed_rows(5)
    expected = titan_logits(config, state)
    found = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(("family", "different"), EXPORTED)
def test_export(family: str, different: str, tmp_path):
    """The folder has the logits of torchtitan's model, and a run that starts from it has its weights to the bit."""
    config = changed_config(family, EXPORTED[family, different])
    state = drawn_state(config)
    save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    export_checkpoint(config, tmp_path / "step-1", tmp_path / "out")
    assert_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32), config, state)
    started = start_from(tmp_path / "out", config)
    assert started.keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in started.items())
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "out"}


def test_the_files_of_the_original_model_take_the_coefficients_too(tmp_path):
    """torchtitan's `last_save_in_hf` writes tensors to the files that the index in `hf_assets_path` names."""
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "assets", max_shard_size=40_000)
    config = changed_config("llama3", unchanged)
    adapter = config.model_spec.state_dict_adapter(config.model_spec.model, str(tmp_path / "assets"))
    before = dict(adapter.fqn_to_index_mapping)
    assert len(set(before.values())) > 1
    hf_state = adapter.to_hf(drawn_state(config))
    assert adapter.fqn_to_index_mapping.keys() == hf_state.keys()
    assert all(adapter.fqn_to_index_mapping[name] == before.get(name, max(before.values())) for name in hf_state)


@pytest.mark.parametrize(("family", "different"), REFUSED)
def test_export_refuses(family: str, different: str, tmp_path):
    change, message = REFUSED[family, different]
    config = changed_config(family, change)
    save(drawn_state(config), checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(ValueError, match=re.escape(message)):
        export_checkpoint(config, tmp_path / "step-1", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"step-1"}


def start_from(folder: Path, config: Any) -> dict[str, Tensor]:
    """Load a folder of transformers as torchtitan's checkpointer does with `initial_load_in_hf`."""
    spec = config.model_spec
    adapter = spec.state_dict_adapter(spec.model, None)
    hf_state = adapter.to_hf({name: torch.full_like(x, torch.nan) for name, x in drawn_state(config).items()})
    load(hf_state, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    return adapter.from_hf(hf_state)


# Starting from a folder -----------------------------------------------------------------------------------------------


def folder_of(tmp_path: Path, config: Any) -> Path:
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "folder", max_shard_size=40_000)
    return tmp_path / "folder"


@pytest.mark.parametrize("different", LOADED)
def test_start_from_a_folder(different: str, tmp_path):
    run = changed_config("llama3", unchanged)
    folder = folder_of(tmp_path, KVShiftLlamaConfig(**LLAMA | LOADED[different]))
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_same_logits(AutoModelForCausalLM.from_pretrained(folder), run, start_from(folder, run))


@pytest.mark.parametrize("different", NOT_LOADED)
def test_a_folder_of_another_model_is_refused(different: str, tmp_path):
    fields, message = NOT_LOADED[different]
    folder = folder_of(tmp_path, KVShiftLlamaConfig(**LLAMA | fields))
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        start_from(folder, changed_config("llama3", unchanged))
    assert str(refused.value).startswith(f"{folder} does not hold the model of this run: ")


def test_a_folder_of_another_family_or_without_shift_is_refused(tmp_path):
    config = changed_config("llama3", unchanged)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="must hold a kvshift_llama, as this run is, got a llama"):
        start_from(tmp_path / "plain", config)
    qwen = folder_of(tmp_path, QWEN3.config(**LLAMA, head_dim=8))
    with pytest.raises(ValueError, match="must hold a kvshift_llama, as this run is, got a kvshift_qwen3"):
        start_from(qwen, config)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    folder = folder_of(tmp_path, KVShiftLlamaConfig(**LLAMA))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json|must hold a kvshift_llama"):  # guessed from the folder's path
        start_from(folder, changed_config("llama3", unchanged))


def test_sliding_layers_of_qwen_are_refused(tmp_path):
    config = changed_config("qwen3", unchanged)
    model: Any = config.model_spec.model
    fields = LLAMA | {"head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "max_window_layers": 1}
    fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": model.layers[0].attention.rope.theta}}
    (tmp_path / "whole").mkdir()
    start_from(folder_of(tmp_path / "whole", QWEN3.config(**fields)), config)
    sliding = QWEN3.config(**fields, use_sliding_window=True, sliding_window=8)
    with pytest.raises(ValueError, match="sliding_window must be None, got 8; layer_types must be "):
        start_from(folder_of(tmp_path, sliding), config)


@pytest.mark.parametrize("change", ["more", "fewer", "larger"])
def test_tensors_beside_those_of_the_model_are_refused(change: str, tmp_path):
    config = changed_config("llama3", unchanged)
    KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.q_proj.bias"
    tensors = load_file(file)
    if change == "more":
        tensors[name] = torch.ones(32)
    elif change == "fewer":
        name = "model.layers.0.self_attn.shift.beta"
        del tensors[name]
    else:
        name = "model.norm.weight"
        tensors[name] = torch.ones(33)
    save_file(tensors, file, {"format": "pt"})
    said = {"more": "left out, got [32]", "fewer": "[2, 2], got None", "larger": "[32], got [33]"}[change]
    message = f"must have the tensors of KVShiftLlamaForCausalLM: {name} must be {said}"
    with pytest.raises(ValueError, match=re.escape(message)):
        start_from(tmp_path, config)


@pytest.mark.parametrize("older", ["model-00000.safetensors", "old.safetensors"])
def test_a_tensor_in_two_files_is_refused(older: str, tmp_path):
    """transformers reads the files that the index names; torchtitan reads all, and would keep one of the two."""
    folder = folder_of(tmp_path, KVShiftLlamaConfig(**LLAMA))
    save_file({"model.norm.weight": torch.full((32,), 2.0)}, folder / older, {"format": "pt"})
    with pytest.raises(ValueError, match=r"must have each tensor once, got model\.norm\.weight in \S+ again"):
        start_from(folder, changed_config("llama3", unchanged))


OTHER_MODELS: dict[str, Change] = {
    "more layers": lambda model: model.layers.append(model.layers[0]),
    "fewer layers": lambda model: model.layers.pop(),
    "all targets": each(shift(targets=("q", "k", "v"))),
    "QK-norm": each(qk_norm(1e-5)),
}


@pytest.mark.parametrize("saved", OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused(saved: str, tmp_path):
    """torch.distributed.checkpoint does not mention tensors of the checkpoint that nobody asked for."""
    other = changed_config("llama3", OTHER_MODELS[saved])
    save(drawn_state(other), checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(ValueError, match=r"must have the tensors of config: layers\..* must be .*, got "):
        export_checkpoint(changed_config("llama3", unchanged), tmp_path / "step-1", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_and_weights_that_are_not_finite_are_refused(tmp_path):
    config = changed_config("llama3", unchanged)
    state = drawn_state(config) | {"norm.weight": torch.full((32,), torch.nan)}
    save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(ValueError, match=r"must have the logits of torchtitan's, up to nan; they differ by nan"):
        export_checkpoint(config, tmp_path / "step-1", tmp_path / "out")
    with pytest.raises(FileExistsError, match="out must be a new folder"):
        export_checkpoint(config, tmp_path / "step-1", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1"}
