"""The models that are tested."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

import kvshift.models.baichuan_m1  # noqa: F401  # registers the model type
from kvshift.models.baichuan_m1 import BaichuanM1ForCausalLM, BaichuanM1Model
from kvshift.models.retrofit import FAMILIES

FAMILY = {family.config.model_type: family for family in FAMILIES}
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2_SIZES = {"vocab_size": 99, "n_embd": 64, "n_inner": 37, "n_layer": 2, "n_head": 4, "n_positions": 512}
GPT2_SIZES |= {name: value for name, value in SIZES.items() if name.endswith("token_id")}


@dataclass(frozen=True)
class Subject:
    """A configuration and its model classes: the decoder, the language model and, if there is one, the classifier."""

    model_type: str
    fields: dict[str, Any]
    classes: tuple[type[PreTrainedModel], ...]
    padding: str = field(default="right", kw_only=True)

    def config(self) -> PreTrainedConfig:
        return AutoConfig.for_model(self.model_type, **self.fields)


def llama(padding: str = "right", **fields: Any) -> Subject:
    classes = tuple(FAMILY["kvshift_llama"].models.values())
    return Subject("kvshift_llama", SIZES | fields, classes, padding=padding)


def stock(model_type: str, **fields: Any) -> Subject:
    """A model of transformers."""
    sizes = GPT2_SIZES if model_type == "gpt2" else SIZES
    return Subject(model_type, sizes | fields, tuple(FAMILY[f"kvshift_{model_type}"].models))


def with_shift(plain: Subject) -> Subject:
    """The same model with KV shift."""
    model_type = f"kvshift_{plain.model_type}"
    return Subject(model_type, plain.fields, tuple(FAMILY[model_type].models.values()))


HALF_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
STOCK = {
    "GPT2": stock("gpt2"),
    "Llama": stock("llama"),
    "Mistral": stock("mistral", sliding_window=5),
    "Qwen2": stock("qwen2"),
    "Qwen3": stock("qwen3", head_dim=8),
    "Gemma3": stock(
        "gemma3_text",
        hidden_size=16,  # PEFT expects no embedding above 100, and Gemma multiplies them by its root
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "GPTNeoX": stock("gpt_neox", **HALF_ROTATED),
    "Phi3": stock("phi3", sliding_window=7, **HALF_ROTATED),
}
BAICHUAN = {
    "rope_theta": 1000.0,
    "sliding_window": 5,
    "sliding_window_layers": [1],
    "num_swa_attention_heads": 2,
    "num_swa_key_value_heads": 1,
}
SUBJECTS = {
    "KVShiftLlamaClamp": llama(shift_constraint="clamp", shift_targets=["v"], tie_word_embeddings=True),
    "KVShiftLlamaGate": llama(shift_constraint="gate", shift_targets=["q", "k", "v"]),
    "KVShiftLlamaEverything": llama(
        padding="left",
        shift_targets=["q", "k", "v"],
        shift_window=4,
        qk_norm=True,
        sliding_window=5,
        attention_bias=True,
    ),
    "BaichuanM1": Subject("baichuan_m1", SIZES | BAICHUAN, (BaichuanM1Model, BaichuanM1ForCausalLM)),
    **{f"KVShift{name}": with_shift(plain) for name, plain in STOCK.items()},
}
