"""Tiny random models of the types in transformers and in kvshift, whose results docs/check.md lists.

    python -m kvshift_lab.check.stock_models

checks each model and writes results/check/transformers.jsonl, with one line for each model, in the working directory.
transformers initialises the weights, with a standard deviation of 0.2 if the model has such an option: at the usual
0.02, attention in such a small model is almost uniform, and errors are small. Windows and chunks have 8 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvshift.models.baichuan_m1
import kvshift.models.llama  # noqa: F401, both register their model types
from kvshift import ShiftOptions
from kvshift.models.retrofit import add_kv_shift
from kvshift_lab.check import check_model
from kvshift_lab.check.suite import report_with_environment
from kvshift_lab.core.json_lines import write_lines
from kvshift_lab.core.messages import log

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
_NO_ATTENTION = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


def _sizes(*leave_out: str, **own: Any) -> dict[str, Any]:
    return {name: value for name, value in _SIZES.items() if name not in leave_out} | own


_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 44, "n_positions": 128}
_SHIFT: dict[str, Any] = {"shift_init": "uniform"}

STOCK: dict[str, dict[str, Any]] = {
    "llama": _sizes(),
    "mistral": _sizes(sliding_window=8),
    "qwen2": _sizes("head_dim"),
    "qwen3": _sizes(),
    "gemma3_text": _sizes(
        sliding_window=8, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_neox": _sizes("head_dim", "num_key_value_heads"),
    "phi3": _sizes("head_dim"),
    "gpt2": {**_GPT2, "initializer_range": 0.2, "bos_token_id": 2, "eos_token_id": 3},
    "gpt_oss": _sizes(
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "inkling_text": _sizes(
        intermediate_size=16,
        layer_types=["hybrid_sliding", "hybrid"],
        sliding_window_size=8,
        swa_head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        d_rel=4,
        rel_extent=8,
        logits_mup_width_multiplier=1.0,
    ),
    "lfm2": _sizes(layer_types=["conv", "full_attention"], conv_L_cache=3, block_multiple_of=4),
    "lfm2_moe": _sizes(layer_types=["conv", "full_attention"], conv_L_cache=3, num_dense_layers=1, **_EXPERTS),
    "lfm3": _sizes(num_hidden_layers=3, sliding_window=8, layer_types=["conv", "sliding_attention", "full_attention"]),
    "qwen3_next": _sizes(shared_expert_intermediate_size=16, **_DELTA, **_EXPERTS),
    "qwen3_5_text": _sizes(**_DELTA),
    "olmo_hybrid": _sizes("head_dim", **_DELTA),
    "bamba": _sizes("head_dim", attn_layer_indices=[1], **_MAMBA),
    "falcon_h1": _sizes(mamba_d_ssm=64, **_MAMBA),
    "granitemoehybrid": _sizes(
        "head_dim", layer_types=["mamba", "attention"], shared_intermediate_size=44, num_local_experts=0, **_MAMBA
    ),
    "nemotron_h": _sizes(
        layers_block_type=["mamba", "attention"],
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        chunk_size=8,
        conv_kernel=4,
    ),
    "zamba2": _sizes(
        "head_dim",
        "num_key_value_heads",
        layers_block_type=["mamba", "hybrid"],
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=4,
        chunk_size=8,
        num_mem_blocks=1,
        adapter_rank=4,
    ),
    "jamba": _sizes(
        "head_dim",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        num_experts=2,
        num_experts_per_tok=1,
    ),
    "minimax": _sizes(
        layer_types=["linear_attention", "full_attention"], block_size=8, num_local_experts=2, num_experts_per_tok=1
    ),
    "mamba": _sizes(*_NO_ATTENTION, state_size=8, time_step_rank=4),
    "mamba2": _sizes(*_NO_ATTENTION, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8),
    "falcon_mamba": _sizes(*_NO_ATTENTION, state_size=8, time_step_rank=4),
    "recurrent_gemma": _sizes(lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"]),
    "rwkv": {
        "vocab_size": 61,
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 44,
    },
    "kvshift_llama": _sizes(**_SHIFT),
    "kvshift_llama, wide": _sizes(shift_window=3, shift_targets=["q", "k", "v"], qk_norm=True, **_SHIFT),
    "kvshift_llama, sliding": _sizes(sliding_window=8, **_SHIFT),
    "baichuan_m1": _sizes(
        "head_dim",
        num_swa_attention_heads=8,
        num_swa_key_value_heads=4,
        sliding_window=8,
        sliding_window_layers=[1],
        rope_theta=1e4,
    ),
}
_RETROFITTED = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_neox", "phi3")
STOCK |= {f"{name} with shift": STOCK[name] for name in _RETROFITTED}

_ATTENTION = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_neox", "phi3", "gpt2", "gpt_oss")
_OURS = tuple(name for name in STOCK if name.startswith(("kvshift", "baichuan_m1")) or name.endswith("with shift"))
GROUPS: dict[str, tuple[str, ...]] = {
    "Attention alone": _ATTENTION,
    "With local or recurrent state": tuple(name for name in STOCK if name not in (*_ATTENTION, *_OURS)),
    "With KV shift": _OURS,
}

_RESULTS = Path("results/check/transformers.jsonl")


def is_known(name: str) -> bool:
    """Return True if the installed transformers has this model type."""
    return _model_type(name) in CONFIG_MAPPING


def build_stock(name: str) -> PreTrainedModel:
    """Return the tiny model of a name in `STOCK`, in evaluation mode, with random weights.

    "gpt2 with shift" is a retrofitted model, with coefficients drawn from U(0, 1). The text behind a comma in a name
    only distinguishes configurations of the same type.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(_model_type(name), **STOCK[name]))
        if name.endswith("with shift"):
            add_kv_shift(model, ShiftOptions(init="uniform"))
    return model.eval()


def main() -> None:
    """Check all known models, and write a row for each: the report and the environment in which it was made."""
    rows = []
    for name in filter(is_known, STOCK):
        report = check_model(build_stock(name))
        log(f"{name}: {len(report.wrong)} of {len(report.verdicts)} wrong", command="check")
        rows.append({"name": name, "config": STOCK[name], **report_with_environment(report, torch.device("cpu"))})
    write_lines(_RESULTS, rows)


def _model_type(name: str) -> str:
    return name.removesuffix(" with shift").partition(",")[0]


if __name__ == "__main__":
    main()
