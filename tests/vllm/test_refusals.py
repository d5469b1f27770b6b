"""Options and models that vLLM cannot serve with KV shift are refused by name, before an engine starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm_cpu
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvshift.models.retrofit import add_kv_shift

from .test_quantized import CONFIGS, quantize

Checkpoint = Callable[[str], Path]

OPTIONS: dict[str, dict[str, Any]] = {
    "pipeline_parallel_size": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    "kv_transfer_config": {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
    "kv_offloading_size": {"kv_offloading_size": 1.0},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8_inc"},
    "kv_cache_dtype_skip_layers": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]},
    "quantization": {"quantization": "fp8"},
    "enable_prompt_embeds": {"enable_prompt_embeds": True},
    "runner": {"runner": "pooling"},
    "speculative_config": {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2}},
    "cpu_offload_gb": {"cpu_offload_gb": 1.0},
    "parallel_drafting": {
        "speculative_config": {"method": "draft_model", "num_speculative_tokens": 2, "parallel_drafting": True}
    },
    "splitting_ops": {"compilation_config": {"splitting_ops": ["vllm::unified_attention_with_output"]}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, checkpoint: Checkpoint) -> None:
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True} | OPTIONS[name]
    if name == "parallel_drafting":
        options["speculative_config"]["model"] = str(checkpoint("draft"))
    with pytest.raises(ValueError, match=f"cannot serve this model.*{name}"):
        EngineArgs(str(checkpoint("llama")), **options).create_engine_config()


def _quantized(**changes: Any) -> tuple[str, dict[str, Any]]:
    return "llama", {"quantization_config": CONFIGS["int"] | changes}


_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}
_ORDERED = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"},
}
_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "quantization must be .* 8-bit": _quantized(config_groups={"0": {"targets": ["Linear"], "weights": _WEIGHTS}}),
    "quantization must .* got 'compressed-tensors'": _quantized(kv_cache_scheme=_CACHE),
    "quantization must be .* got 'compressed-tensors'": (
        "llama",
        {"quantization_config": CONFIGS["compressed"] | {"config_groups": {"0": _ORDERED}}},
    ),
    "quantization .* got 'compressed-tensors'": _quantized(config_groups={}),
    "quantization must be that .* got 'compressed-tensors'": (
        "llama",
        {"compression_config": CONFIGS["int"] | {"kv_cache_scheme": _CACHE}},
    ),
    "quantization must .* got 'auto_gptq'": ("llama", {"quantization_config": CONFIGS["gptq"] | {"bits": 8}}),
    "quantization must be .* got 'auto_gptq'": (
        "llama",
        {"quantization_config": CONFIGS["gptq"] | {"dynamic": {r"+:.*o_proj": {"bits": 8}}}},
    ),
    "sliding_window": ("llama", {"shift_window": 3, "sliding_window": 2}),
    "rope_parameters": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "max_model_len must be at most max_position_embeddings, 512, .* got 2048": ("llama-dynamic", {}),
    "architectures": ("llama", {"architectures": ["KVShiftLlamaForSequenceClassification"]}),
    "tie_word_embeddings": ("baichuan-m1", {"tie_word_embeddings": True}),
    "shift_targets must be keys and values": ("q-shift", {}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_models(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, fields = FIELDS[name]
    folder = changed(checkpoint(model), tmp_path / "changed", fields)
    with pytest.raises(ValueError, match=f"cannot serve this model.*{name}"):
        EngineArgs(str(folder), skip_tokenizer_init=True).create_engine_config()


def test_kv_heads_that_cannot_be_shared_out(checkpoint: Checkpoint, tmp_path: Path) -> None:
    fields = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
    folder = changed(checkpoint("llama"), tmp_path / "changed", fields)
    with pytest.raises(ValueError, match=r"tensor_parallel_size must divide the KV heads .*; got 2 for \[3\]"):
        EngineArgs(str(folder), skip_tokenizer_init=True, tensor_parallel_size=2).create_engine_config()


def test_a_family_that_is_not_served(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    add_kv_shift(Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads))).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type must be one of .* got 'kvshift_gemma3_text'"):
        EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_engine_config()


def test_a_backend_whose_kernels_may_not_take_such_pages(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPUAttentionBackend, "get_name", staticmethod(lambda: "HPC_ATTN"))
    with pytest.raises(ValueError, match=r"attention_backend must be one of CPU_ATTN, .*, got HPC_ATTN"):
        LLM(str(checkpoint("llama")), skip_tokenizer_init=True, dtype="float32", enforce_eager=True)


def changed(folder: Path, copy: Path, fields: dict[str, Any]) -> Path:
    """Return a copy of a model with other fields in its configuration."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | fields))
    return copy


_ALPHA, _BETA = (f"model.layers.1.self_attn.shift.{name}" for name in ("alpha", "beta"))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (_ALPHA, torch.zeros(1, 2), r"must have the shape \(2, 2\), one row for each KV head, got \(1, 2\) from the"),
        (_ALPHA, torch.zeros(3, 2), r"must have the shape \(2, 2\), one row for each KV head, got \(3, 2\) from the"),
        (_BETA, None, r"not initialized from checkpoint.*model\.layers\.1\.self_attn\.shift\.beta"),
        (_BETA, torch.full((2, 2), torch.nan), r"coefficients of model\.layers\.1\.self_attn\.shift must be finite"),
    ],
    ids=["one head", "three heads", "missing", "NaN"],
)
def test_coefficients_of_a_checkpoint(
    name: str, value: torch.Tensor | None, reason: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = changed(checkpoint("llama"), tmp_path / "changed", {})
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights if value is None else weights | {name: value}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=reason):
        LLM(str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_coefficients_missing_from_a_quantized_checkpoint(
    name: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself misses weights only if the model is not quantized."""
    monkeypatch.setattr(scaled_mm_cpu, "check_cpu_sgl_kernel", lambda n, k, dtype: False)  # see test_quantized.py
    quantize(checkpoint("llama-retrofit"), tmp_path / "quantized", "int")
    weights = load_file(tmp_path / "quantized/model.safetensors")
    del weights[f"model.layers.1.self_attn.shift.{name}"]
    save_file(weights, tmp_path / "quantized/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"must have the coefficients of model\.layers\.1\.self_attn\.shift, but some"):
        LLM(
            str(tmp_path / "quantized"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64
        )


_DRAFTS = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        # vLLM 0.32.0 gives a draft model the blocks of the first group of layers, whatever its own group.
        ("mistral-sliding", {"speculative_config": _DRAFTS}, "speculative_config: all layers of the model and of its"),
        # vLLM's attention on a CPU takes multiples of 32.
        ("llama", {"block_size": 16}, r"block_size must .* of \[MultipleOf\(32\)\] tokens; with 16"),
    ],
)
def test_blocks(model: str, options: dict[str, Any], message: str, checkpoint: Checkpoint) -> None:
    if "speculative_config" in options:
        options = {"speculative_config": _DRAFTS | {"model": str(checkpoint("draft"))}, "block_size": 32}
    common = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 64}
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint(model)), **common, **options)
