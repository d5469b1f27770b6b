"""A tiny model of every family, and its truth: transformers' own model, with loops that shift its projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvshift import KVShift, ShiftOptions
from kvshift.models.retrofit import add_kv_shift

from ..llama.tiny import PAD, randomize

# 4 query heads, 2 KV heads and a head size of 12, a multiple of 4: on a CPU, matrix products of other sizes round
# differently for different layouts of their operands.
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 2,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 29, "n_positions": 128}),
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": 5}),
    "Qwen2": ("qwen2", {}),
    "Qwen2, sliding window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "Qwen3": ("qwen3", {"head_dim": 12}),
    "Gemma 3": (
        "gemma3_text",
        {
            "head_dim": 12,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 9,
        },
    ),
    "GPT-NeoX": ("gpt_neox", PARTIAL),
    "Phi-3": ("phi3", {**PARTIAL, "sliding_window": 7}),
}


def tiny_config(family: str, **options: Any) -> PreTrainedConfig:
    model_type, own = FAMILIES[family]
    sizes = {
        name: SIZES[name] for name in SIZES if model_type != "gpt2" or not name.startswith(("hidden", "num_", "max_"))
    }
    if model_type in ("gpt2", "gpt_neox"):
        sizes.pop("num_key_value_heads", None)
    return AutoConfig.for_model(model_type, **{**sizes, **own, **options})


def stock(
    family: str,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    *,
    classifies: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Return transformers' own model with random weights of standard deviation 0.3, in evaluation mode."""
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    model = auto.from_config(tiny_config(family, **options), attn_implementation=attention)
    randomize(model)
    if model.can_generate():
        model.generation_config.pad_token_id = PAD
    return model.to(dtype).eval()


def shifted(
    family: str,
    dtype: torch.dtype = torch.float64,
    attention: str = "sdpa",
    *,
    classifies: bool = False,
    shift: dict[str, Any] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Return the same after `add_kv_shift`, with coefficients drawn from U(-1, 1): different for each head."""
    model = stock(family, dtype, attention, classifies=classifies, **options)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_kv_shift(model, ShiftOptions(**{"init": "identity", **(shift or {})}))
    randomize(model)
    model.load_state_dict(weights, strict=False)
    return model


def shifted_gpt2(
    dtype: torch.dtype = torch.float32, attention: str = "sdpa", *, tie_word_embeddings: bool = False, **shift: Any
) -> Any:
    """Return the GPT-2 with these options of the shift."""
    return shifted("GPT-2", dtype, attention, shift=shift, tie_word_embeddings=tie_word_embeddings)


def truth_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return transformers' own model with the same weights, whose projections shift by loops; for uncached calls."""
    family = type(model).family
    plain = next(plain for plain, with_shift in family.models.items() if with_shift is type(model))
    config_class = plain.config_class
    names = set(config_class().to_dict())
    fields = {name: value for name, value in vars(model.config).items() if name in names and name != "model_type"}
    truth = plain(config_class(**fields))
    truth.set_attn_implementation("eager")
    truth.to(model.dtype).eval()
    truth.load_state_dict({name: x for name, x in model.state_dict().items() if ".shift." not in name})
    if truth.can_generate():
        truth.generation_config = model.generation_config
    shifts = [module for module in model.modules() if isinstance(module, KVShift)]
    attentions = [module for module in truth.modules() if type(module) is family.attention[0]]
    heads, kv_heads = family.heads(model.config)
    for attention, shift in zip(attentions, shifts, strict=True):
        _shift_projections(attention, shift.coefficients(), heads, kv_heads)
    return truth


class _Shifted(nn.Module):
    """A projection followed by the shift of some of its outputs.

    Args:
        projection: A module whose output is (B, T, F).
        columns: For each target, the indices of its heads among the F outputs, (heads, D).
        coefficients: For each target, its coefficients (heads, W).
    """

    def __init__(self, projection: nn.Module, columns: dict[str, Tensor], coefficients: dict[str, Tensor]) -> None:
        super().__init__()
        self.projection, self.columns, self.coefficients = projection, columns, coefficients

    def forward(self, x: Tensor) -> Tensor:
        raw = self.projection(x)
        y = raw.clone()
        for target, mix in self.coefficients.items():
            if target in self.columns:
                columns = self.columns[target]
                for t in range(raw.shape[1]):
                    lags = range(min(t + 1, mix.shape[1]))
                    y[:, t, columns] = sum(mix[:, lag, None].to(raw) * raw[:, t - lag][:, columns] for lag in lags)
        return y


def _shift_projections(attention: nn.Module, coefficients: dict[str, Tensor], heads: int, kv_heads: int) -> None:
    def wrap(name: str, columns: dict[str, Tensor]) -> None:
        setattr(attention, name, _Shifted(getattr(attention, name), columns, coefficients))

    def part(begin: int, count: int, size: int) -> Tensor:
        return torch.arange(begin, begin + count * size).view(count, size)

    if hasattr(attention, "query_key_value"):
        size = attention.head_size
        columns = torch.arange(3 * heads * size).view(heads, 3, size)
        wrap("query_key_value", {"q": columns[:, 0], "k": columns[:, 1], "v": columns[:, 2]})
        return
    size, names = attention.head_dim, {"q": heads, "k": kv_heads, "v": kv_heads}
    begin, columns = 0, {}
    for target, count in names.items():
        if hasattr(attention, "q_proj"):
            wrap(f"{target}_proj", {target: part(0, count, size)})
        columns[target] = part(begin, count, size)
        begin += count * size
    for name in ("qkv_proj", "c_attn"):
        if hasattr(attention, name):
            wrap(name, columns)
