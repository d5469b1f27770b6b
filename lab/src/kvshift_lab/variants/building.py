"""Build the model of a run from its options: size, variant and initial weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.core.atomic import write_json
from kvshift_lab.core.errors import LabError, nearest, require
from kvshift_lab.variants.bidirectional import EncoderOptions, encoder_config
from kvshift_lab.variants.by_name import find_variant
from kvshift_lab.variants.model_config import ModelConfig, explicit_fields, size_fields
from kvshift_lab.variants.small_gpt2 import GPT2Options, gpt2_config
from kvshift_lab.variants.variant import Size, shift_layers

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def llama_config(
    options: ModelConfig, *, vocab_size: int, sequence_length: int, base: Mapping[str, Any] | None = None
) -> KVShiftLlamaConfig:
    """Return the configuration of the model that `options` describe.

    Args:
        options: model options of the run.
        vocab_size: number of tokens of the tokenizer.
        sequence_length: length of the training sequences.
        base: fields that the options override; None for those of `options.size` or `options.config`.
    """
    base = {**(_base(options) if base is None else base), **explicit_fields(options)}
    if options.rope_theta is not None:
        rope = base.get("rope_parameters") or base.pop("rope_scaling", None) or {"rope_type": "default"}
        base["rope_parameters"] = {**rope, "rope_theta": options.rope_theta}
    base.setdefault("vocab_size", vocab_size)
    _check_numbers(base)
    if base["vocab_size"] < vocab_size:
        raise LabError(
            f"model.vocab_size must be at least {vocab_size}, the number of tokens of the tokenizer, got "
            f"{base['vocab_size']}"
        )
    base["max_position_embeddings"] = max(base.get("max_position_embeddings", 0), sequence_length)
    # Generation must not stop at, or pad with, token ids of another tokenizer.
    base |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True}
    try:
        config = KVShiftLlamaConfig(**base)
    except Exception as error:  # transformers' strict dataclasses wrap the reason in errors of their own
        raise LabError(f"the options under model are invalid: {error.__cause__ or error}") from error
    heads, kv_heads = config.num_attention_heads, cast(int, config.num_key_value_heads)
    theta = cast(dict[str, Any], config.rope_parameters)["rope_theta"]
    require(0 < theta < math.inf, "model.rope_theta", theta, "more than 0 and finite")
    if cast(int, config.head_dim) % 2:
        raise LabError(
            f"model.hidden_size / num_attention_heads must be even, for the rotary embedding; got {config.hidden_size} "
            f"/ {heads}"
        )
    if heads % kv_heads:
        raise LabError(
            f"model.num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}"
        )
    return config


def describe(options: ModelConfig | GPT2Options | EncoderOptions, *, vocab_size: int, length: int) -> Size:
    """Return the model configuration that options of any family describe.

    Args:
        options: model options.
        vocab_size: number of tokens of the tokenizer or the task.
        length: length of the training sequences.
    """
    return _DESCRIBED[type(options)](options, vocab_size, length)


def build_model(
    size: Size, *, seed: int, variant: str | None = None, zero_outputs: bool = False
) -> KVShiftLlamaForCausalLM:
    """Build a model of the given size and variant.

    Args:
        size: configuration of the model.
        seed: random seed of its weights; see `ModelVariant.build`.
        variant: name of the variant; None for KV shift or vanilla, depending on the size's `shift_targets`.
        zero_outputs: whether to initialise `o_proj` and `down_proj`, the output projections of a Llama's attention and
            MLP, to 0 (modded-nanogpt, BlaGPT). The initial values of all other weights do not change.
    """
    model: Any = find_variant(variant or "kv-shift", "model.variant").build(size, seed=seed)
    if zero_outputs:
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
    return model


def freeze_shift(model: nn.Module, options: ModelConfig | GPT2Options | EncoderOptions) -> None:
    """Keep the coefficients of the shift that the options freeze at their values.

    Raises:
        LabError: `freeze_shift_lags` with a gate, whose two coefficients are one parameter.
    """
    lags = getattr(options, "freeze_shift_lags", None)
    for layer in shift_layers(model):
        layer.requires_grad_(not options.freeze_shift)
        if not lags or options.freeze_shift:
            continue
        if layer.options.constraint == "gate":
            raise LabError("model.freeze_shift_lags must be left out with shift_constraint gate, got True")
        for coefficients in layer.parameters():
            coefficients.register_hook(_without_lags)


def _without_lags(gradient_GW: Tensor) -> Tensor:
    """Return the gradient of coefficients with 0 for those of earlier tokens, which then stay as they are."""
    return torch.cat([gradient_GW[:, :1], torch.zeros_like(gradient_GW[:, 1:])], dim=1)


def with_vanilla_parameters(options: ModelConfig) -> ModelConfig:
    """Return the options with an MLP width at which the model has as many parameters as vanilla at the given width F.

        intermediate_size = F - round(added / (3 E layers))

    The parameter counts agree to within half of 3 E layers. Weights that change their shape, and all weights drawn
    after them, no longer have the initial values of the vanilla model.

    Args:
        options: options with a variant, as returned by `with_variant`.
    """
    size = llama_config(options, vocab_size=1, sequence_length=1)
    added = find_variant(options.variant or "kv-shift").added_parameters(size)
    before = size.intermediate_size
    width = before - round(added / (3 * size.hidden_size * size.num_hidden_layers))
    require(
        width >= 1,
        "model.intermediate_size",
        before,
        f"more than {before - width}, by which it is reduced to match vanilla's parameters",
    )
    return options if width == before else replace(options, intermediate_size=width)


def rewrite_config_as_llama(folder: Path) -> None:
    """Change the model type in a saved model's config.json to llama if the model equals transformers' Llama.

    The weights of a vanilla model have the names that transformers' Llama uses, so programs that do not know this
    package can then load it. Models with shift, QK-norm or a sliding window, and those of other families, are not
    changed.
    """
    path = folder / "config.json"
    if not path.exists():  # a checkpoint in shards has none
        return
    values = json.loads(path.read_text())
    if values["model_type"] != KVShiftLlamaConfig.model_type:
        return
    if values["shift_targets"] or values["qk_norm"] or values["sliding_window"] is not None:
        return
    ours = {field.name for field in fields(KVShiftLlamaConfig)} - {field.name for field in fields(LlamaConfig)}
    plain = {name: value for name, value in values.items() if name not in ours}
    write_json(path, {**plain, "model_type": LlamaConfig.model_type, "architectures": [LlamaForCausalLM.__name__]})


def count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Count all "parameters", and the "shift_parameters" among them, which are the coefficients of the shift."""
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shift_parameters": sum(p.numel() for layer in shift_layers(model) for p in layer.parameters()),
    }


def _check_numbers(base: dict[str, Any]) -> None:
    """Raise a LabError for values that transformers would not check, or would report without naming the option."""
    for name in _SIZES:
        value = base.get(name, 1)
        whole = value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31)
        require(whole, f"model.{name}", value, "a whole number from 1 to 2**31 - 1")
    for name in ("rms_norm_eps", "attention_dropout"):
        value = base.get(name, 0.0)
        require(isinstance(value, (int, float)) and 0 <= value <= 1, f"model.{name}", value, "between 0 and 1")
    width, heads = base.get("hidden_size"), base.get("num_attention_heads")
    require(
        not (width and heads) or base.get("head_dim") is not None or width % heads == 0,
        "model.hidden_size",
        width,
        f"a multiple of num_attention_heads ({heads})",
    )
    act = base.get("hidden_act", "silu")
    require(act in ACT2FN, "model.hidden_act", act, f"one of {', '.join(ACT2FN)}")


def _base(options: ModelConfig) -> dict[str, Any]:
    if options.size is not None and options.config is not None:
        raise LabError(f"model.size ({options.size}) and model.config ({options.config}) cannot both be given")
    return size_fields(options) if options.config is None else _read(options.config)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LabError(f"model.config: {path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise LabError(f"model.config: {path} must hold a JSON object, got {type(values).__name__}")
    kind = values.pop("model_type", KVShiftLlamaConfig.model_type)
    if kind not in ("llama", KVShiftLlamaConfig.model_type):
        raise LabError(f"model.config: {path} is of model_type {kind!r}; expected llama or kvshift_llama")
    for of_weights in ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path"):
        values.pop(of_weights, None)
    # The last four names below are fields of older versions of transformers, or properties that it also saves.
    known = [field.name for field in fields(KVShiftLlamaConfig)]
    for name in values:
        if name not in (*known, "rope_theta", "rope_scaling", "layer_types", "output_attentions"):
            raise LabError(f"model.config: {path} has an unknown field {name!r}; {nearest(name, known)}")
    return values


# For each class of options, a function from options, vocabulary size and sequence length to the configuration.
_DESCRIBED: dict[type, Callable[[Any, int, int], Size]] = {
    ModelConfig: lambda options, tokens, length: llama_config(options, vocab_size=tokens, sequence_length=length),
    GPT2Options: lambda options, tokens, length: gpt2_config(options, vocab_size=tokens, length=length),
    EncoderOptions: lambda options, tokens, length: encoder_config(options, vocab_size=tokens, length=length),
}
