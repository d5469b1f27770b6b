"""Tiny checkpoints in the released layout, written with safetensors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvshift.models.baichuan_m1  # noqa: F401  # registers the model type
from kvshift.models.baichuan_m1 import BaichuanM1ForCausalLM

from ..llama.tiny import PAD

# There are 3 layers; the middle one has a window, and another number and size of heads.
CONFIG: dict[str, Any] = {
    "architectures": ["BaichuanM1ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanM1ForCausalLM"},
    "model_type": "baichuan_m1",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 29,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_swa_attention_heads": 6,
    "num_swa_key_value_heads": 3,
    "sliding_window": 5,
    "sliding_window_layers": [1],
    "conv_window": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rope_theta": 1000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 2,
    "eos_token_id": None,
    "torch_dtype": "float32",
}


def config_with(**changes: Any) -> dict[str, Any]:
    """Return `CONFIG` with other values; a field that is None is left out."""
    return {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of the released layout."""
    width, mlp, vocabulary = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(config["num_hidden_layers"]):
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        if layer in config["sliding_window_layers"]:
            heads = config.get("num_swa_attention_heads", heads)
            kv_heads = config.get("num_swa_key_value_heads", kv_heads)
        name = f"model.layers.{layer}."
        found[f"{name}self_attn.W_pack.weight"] = (width + 2 * kv_heads * width // heads, width)
        found[f"{name}self_attn.o_proj.weight"] = (width, width)
        found[f"{name}self_attn.conv_k"] = found[f"{name}self_attn.conv_v"] = (1, 1, kv_heads, 1, 2)
        found[f"{name}mlp.gate_proj.weight"] = found[f"{name}mlp.up_proj.weight"] = (mlp, width)
        found[f"{name}mlp.down_proj.weight"] = (width, mlp)
        found[f"{name}input_layernorm.weight"] = found[f"{name}post_attention_layernorm.weight"] = (width,)
    found["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (vocabulary, width)
    return found


def checkpoint(config: dict[str, Any] = CONFIG, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Draw weights from N(0, 0.3), norms from N(1, 0.3) and convolutions from U(-1, 1): different in every head."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        if "conv" in name:
            weight = torch.rand(shape, generator=generator) * 2 - 1
        else:
            weight = torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)
        weights[name] = weight.to(dtype)
    return weights


def write(
    folder: Path, weights: dict[str, Tensor] | None = None, config: dict[str, Any] = CONFIG, shards: int = 1
) -> Path:
    """Write a folder like the released ones, with one file of weights or several and their index."""
    weights = checkpoint(config) if weights is None else weights
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata)
        return folder
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    names = list(weights)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata)
        index["weight_map"] |= dict.fromkeys(part, file)
        index["metadata"]["total_size"] += sum(tensor.numel() * tensor.itemsize for tensor in part.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def load(folder: Path, **options: Any) -> Any:
    """Load a model in evaluation mode through the Auto class, as a user does."""
    model = AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float64, **options})
    assert type(model) is BaichuanM1ForCausalLM
    model.generation_config.pad_token_id = PAD
    return model.eval()
