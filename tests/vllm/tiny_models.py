"""Small models of every family that vLLM serves; weights are so large that every coefficient affects the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvshift import KVShift, ShiftOptions
from kvshift.models.baichuan_m1 import BaichuanM1Config, BaichuanM1ForCausalLM
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.models.retrofit import add_kv_shift

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on a CPU supports few sizes
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _kvshift_llama(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: _drawn(KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**SIZES | changes)))


def _retrofitted(model: Any, config: Any, **changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: _drawn(add_kv_shift(model(config(**SIZES | changes)), ShiftOptions()))


def _baichuan_m1(**changes: Any) -> Callable[[], PreTrainedModel]:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    sizes |= {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
    sizes |= {"num_swa_attention_heads": 4, "num_swa_key_value_heads": 4, "sliding_window": 40}
    sizes |= {"sliding_window_layers": [1, 3], "rope_theta": 1e4}
    return lambda: _drawn(BaichuanM1ForCausalLM(BaichuanM1Config(**sizes | changes)))


@torch.no_grad()
def _drawn(model: PreTrainedModel) -> PreTrainedModel:
    """Draw random biases, norms and coefficients, which differ between heads, and return the model."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.2)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
    for module in model.modules():
        if isinstance(module, KVShift):
            for parameter in module.parameters():
                parameter.uniform_(-0.3, 1)
    return model.eval()


TINY_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _kvshift_llama(),
    "llama-window-3-linear": _kvshift_llama(
        shift_window=3, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama-keys-gate-llama3": _kvshift_llama(
        shift_targets=["k"],
        shift_constraint="gate",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-yarn": _kvshift_llama(
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    ),
    "llama-dynamic": _kvshift_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "llama-values-clamp-qk-norm": _kvshift_llama(
        shift_targets=["v"],
        shift_window=4,
        shift_constraint="clamp",
        qk_norm=True,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "llama-vanilla": _kvshift_llama(shift_targets=[]),
    "llama-sliding": _kvshift_llama(shift_window=3, sliding_window=3),
    "llama-retrofit": _retrofitted(LlamaForCausalLM, LlamaConfig, mlp_bias=True),
    "mistral": _retrofitted(MistralForCausalLM, MistralConfig, sliding_window=None),
    "qwen2": _retrofitted(Qwen2ForCausalLM, Qwen2Config, hidden_size=128, tie_word_embeddings=True),
    "qwen3": _retrofitted(Qwen3ForCausalLM, Qwen3Config, attention_bias=True),
    "qwen3-of-4-bits": _retrofitted(Qwen3ForCausalLM, Qwen3Config, attention_bias=True, intermediate_size=96),
    "mistral-sliding": _retrofitted(MistralForCausalLM, MistralConfig, sliding_window=40),
    "qwen2-sliding": _retrofitted(
        Qwen2ForCausalLM, Qwen2Config, hidden_size=128, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "qwen3-sliding": _retrofitted(
        Qwen3ForCausalLM, Qwen3Config, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "baichuan-m1": _baichuan_m1(),
    "draft": lambda: _drawn(LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1}))),
    "draft-with-shift": _kvshift_llama(num_hidden_layers=1, shift_window=3),
    "q-shift": _kvshift_llama(shift_targets=["q", "k", "v"]),
}
