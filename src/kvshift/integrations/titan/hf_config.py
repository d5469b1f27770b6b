"""Configurations of torchtitan and of transformers for the same model, compared field by field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm, RoPE
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear, VarlenAttention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from kvshift.integrations.titan.shifted_gqa import ShiftedGQAttention, shifted_attention
from kvshift.layers.options import ShiftOptions
from kvshift.models import llama, retrofit  # noqa: F401  # imported to register their configurations
from kvshift.models.llama import KVShiftLlamaConfig
from kvshift.models.retrofit.families import QWEN3

# Fields of torchtitan that do not change what a model computes from given weights.
_START_AND_PLACE = {"param_init", "sharding_config"}
# Fields of transformers that do not. (The last two only determine `sliding_window` and `layer_types`.)
_OTHER_FIELDS = {field.name for field in fields(PreTrainedConfig)} - {"tie_word_embeddings"}
_OTHER_FIELDS |= {"bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "shift_init"}
_OTHER_FIELDS |= {"max_position_embeddings", "use_cache", "max_window_layers", "use_sliding_window"}
_SHOWN = 3  # differences in a message


def hf_config(model: Any) -> Any:
    """Return the configuration of the same model in transformers, of type `kvshift_llama` or `kvshift_qwen3`.

    Its values are those of the first layer and of the final norm. The configuration of torchtitan is then rebuilt from
    it, and every field of every layer of the two is compared.

    Args:
        model: torchtitan's configuration of a Llama 3 or Qwen 3 whose attention has a shift.

    Raises:
        ValueError: transformers has no such model; the message names the first fields that differ.
    """
    layer = model.layers[0]
    for name, expected in (("attention", ShiftedGQAttention.Config), ("feed_forward", FeedForward.Config)):
        if not _is_implementation_of(getattr(layer, name), expected):
            found = type(getattr(layer, name)).__qualname__
            raise ValueError(f"layers.0.{name} must be {expected.__qualname__} for transformers, got {found}")
    attention = layer.attention
    values: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
        "max_position_embeddings": attention.rope.max_seq_len,
        "rms_norm_eps": model.norm.eps,
        "rope_parameters": _rope_parameters(attention.rope),
        "tie_word_embeddings": model.enable_weight_tying,
        "attention_bias": attention.wo.bias,
        **attention.shift.options.as_fields(),
    }
    if isinstance(model, Llama3Model.Config):
        has = {"qk_norm": attention.qk_norm is not None, "mlp_bias": layer.feed_forward.w1.bias}
        config: Any = KVShiftLlamaConfig(**values, **has)
    else:
        config = QWEN3.config(**values)
    different = list(_differences(model, _titan_config(config, model)))
    if different:
        raise ValueError(f"transformers has no such {config.model_type}: {'; '.join(different[:_SHOWN])}")
    return config


def check_folder(model: Any, folder: str | Path) -> None:
    """Raise a ValueError unless a folder of transformers holds the same model as a configuration of torchtitan.

    All fields that change logits are compared, and names and shapes of all tensors in its *.safetensors. As torchtitan
    reads all of these files, a tensor in two of them is an error.

    Args:
        model: as in `hf_config`.
        folder: with config.json and the weights.
    """
    expected, found = hf_config(model), AutoConfig.from_pretrained(folder)
    if type(found) is not type(expected):
        raise ValueError(f"{folder} must hold a {expected.model_type}, as this run is, got a {found.model_type}")
    names = [field.name for field in fields(expected) if field.name not in _OTHER_FIELDS]
    values = [(name, getattr(expected, name), getattr(found, name)) for name in names]
    different = [f"{name} must be {here!r}, got {there!r}" for name, here, there in values if here != there]
    if different:
        raise ValueError(f"{folder} does not hold the model of this run: {'; '.join(different[:_SHOWN])}")
    shapes: dict[str, list[int]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found_here = {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        if twice := sorted(shapes.keys() & found_here.keys()):
            raise ValueError(f"{folder}/*.safetensors must have each tensor once, got {twice[0]} in {file.name} again")
        shapes |= found_here
    check_tensors(expected, shapes, f"{folder}/*.safetensors")


def check_tensors(config: Any, shapes: dict[str, list[int]], where: str) -> None:
    """Raise a ValueError unless names and shapes are those of the parameters of a model of transformers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    different = sorted(name for name in {*expected, *shapes} if expected.get(name) != shapes.get(name))
    if different:
        said = (f"{name} must be {expected.get(name, 'left out')}, got {shapes.get(name)}" for name in different)
        raise ValueError(f"{where} must have the tensors of {type(model).__name__}: {'; '.join([*said][:_SHOWN])}")


def _titan_config(config: Any, like: Any) -> Any:
    """Return torchtitan's configuration of a model of transformers.

    Args:
        config: the model in transformers.
        like: torchtitan's configuration from which to take what transformers does not say: whether queries, keys and
            values have one matrix, how dimensions of a head are paired for RoPE, which implementation of attention is
            used, and whether numbers are left out that follow from others.
    """
    dim, vocabulary, head_dim = config.hidden_size, config.vocab_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    is_llama = isinstance(config, KVShiftLlamaConfig)
    bias, mlp_bias = config.attention_bias, getattr(config, "mlp_bias", False)

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps)

    def linear(inputs: int, outputs: int, bias: bool = False) -> Linear.Config:
        return Linear.Config(in_features=inputs, out_features=outputs, bias=bias)

    def qkv(like: Any) -> Any:
        if not isinstance(like, FusedQKVLinear.Config):
            wq, wkv = linear(dim, heads * head_dim, bias), linear(dim, kv_heads * head_dim, bias)
            return QKVLinear.Config(head_dim=head_dim, wq=wq, wkv=wkv)
        wqkv = linear(dim, (heads + 2 * kv_heads) * head_dim, bias)
        return FusedQKVLinear.Config(head_dim=head_dim, n_heads=heads, n_kv_heads=kv_heads, wqkv=wqkv)

    def attention(like: ShiftedGQAttention.Config) -> Any:
        inner: Any = like.inner_attention
        plain = GQAttention.Config(
            n_heads=heads,
            n_kv_heads=None if like.n_kv_heads is None else kv_heads,
            head_dim=None if like.head_dim is None else head_dim,
            dim=dim,
            qkv_linear=qkv(like.qkv_linear),
            wo=linear(heads * head_dim, dim, bias),
            qk_norm=norm(head_dim) if not is_llama or config.qk_norm else None,
            inner_attention=VarlenAttention.Config() if isinstance(inner, VarlenAttention.Config) else inner,
            rope=_rope(config, like.rope),
        )
        return shifted_attention(plain, ShiftOptions.of(config))

    def layer(like: Any) -> Any:
        width, block = config.intermediate_size, Llama3TransformerBlock if is_llama else Qwen3TransformerBlock
        up, down = linear(dim, width, mlp_bias), linear(width, dim, mlp_bias)
        return block.Config(
            attention=attention(like.attention),
            feed_forward=FeedForward.Config(w1=up, w2=down, w3=up),
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
        )

    return (Llama3Model if is_llama else Qwen3Model).Config(
        dim=dim,
        vocab_size=vocabulary,
        lm_head=linear(dim, vocabulary),
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim),
        norm=norm(dim),
        layers=[layer(each) for each in like.layers],
        enable_weight_tying=config.tie_word_embeddings,
    )


def _rope_parameters(rope: RoPE.Config) -> dict[str, Any]:
    if rope.scaling != "llama":  # if it is another, the comparison finds it
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": rope.scaling_factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }


def _rope(config: Any, like: Any) -> RoPE.Config:
    """Return the inverse of `_rope_parameters`; what the kind of scaling does not use is that of `like`."""
    given = config.rope_parameters
    unused = ("scaling_factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = {name: getattr(like, name) for name in unused}
    if given["rope_type"] == "llama3":
        scaling = {name: given["factor" if name == "scaling_factor" else name] for name in unused}
    yarn = ("rope_factor", "beta_fast", "beta_slow", "original_seq_len", "truncate")
    return (ComplexRoPE if isinstance(like, ComplexRoPE.Config) else CosSinRoPE).Config(
        dim=config.head_dim,
        max_seq_len=config.max_position_embeddings,
        theta=given["rope_theta"],
        scaling="llama" if given["rope_type"] == "llama3" else "none",
        **scaling,
        **{name: getattr(like, name) for name in yarn},
    )


def _differences(given: Any, expected: Any, name: str = "") -> Iterator[str]:
    """Describe the fields in which two configurations differ, by their path."""
    if is_dataclass(expected) and _is_implementation_of(given, type(expected)):
        for field in fields(expected):
            if field.name not in _START_AND_PLACE:
                path = f"{name}.{field.name}" if name else field.name
                yield from _differences(getattr(given, field.name), getattr(expected, field.name), path)
    elif isinstance(expected, list) and isinstance(given, list) and len(given) == len(expected):
        for i, (one, other) in enumerate(zip(given, expected, strict=True)):
            yield from _differences(one, other, f"{name}.{i}")
    elif given != expected:
        shown = [type(x).__qualname__ if is_dataclass(x) else repr(x) for x in (expected, given)]
        yield f"{name} must be {shown[0]}, got {shown[1]}"


def _is_implementation_of(given: Any, expected: type) -> bool:
    """Return True if a configuration is of a class, or of torchtitan's own subclass of it, such as one for float8."""
    if type(given) is expected:
        return True
    return isinstance(given, expected) and type(given).__module__.startswith("torchtitan.")
