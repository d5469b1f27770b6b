"""`--init-from`: runs that start from the weights and the tokenizer of a model (fine-tuning)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvshift.models.llama import KVShiftLlamaConfig
from kvshift.models.retrofit import FAMILIES
from kvshift_lab.core.errors import LabError
from kvshift_lab.data.config import DataConfig
from kvshift_lab.run.loading import MODEL_CONFIG_ERRORS, first_non_finite_parameter, without_report
from kvshift_lab.run.model_files import locate
from kvshift_lab.variants.building import llama_config
from kvshift_lab.variants.model_config import ModelConfig

_RETROFITTED = tuple(family.config for family in FAMILIES)


@dataclass(frozen=True)
class Pretrained:
    """A model to start from.

    Attributes:
        name: name of the model, as given by the user.
        folder: folder of the model, or its name on the hub.
        tokenizer: folder of the tokenizer, or the model's name on the hub.
        config: configuration of the model. `shift_targets` is empty for a plain Llama. For other families, this is
            the configuration with shift of `kvshift.models.retrofit`.
    """

    name: str
    folder: str
    tokenizer: str
    config: Any


def find_pretrained(name: str, log: Callable[[str], Any]) -> Pretrained:
    """Find a model by a run folder, a model folder or a name on the hub, and read its configuration, but no weights.

    Raises:
        LabError: the model does not exist, is quantized, or is neither a Llama, with or without KV shift, nor an output
            of `kvshift retrofit`.
    """
    try:
        folder, tokenizer = locate(name, log)
        found: Any = AutoConfig.from_pretrained(folder)
        values: dict[str, Any] = found.to_dict()
        kind = values.pop("model_type")
        if kind not in ("llama", KVShiftLlamaConfig.model_type) and not isinstance(found, _RETROFITTED):
            raise LabError(
                f"{name} has model_type {kind!r}; expected llama, kvshift_llama or an output of `kvshift retrofit`"
            )
        if values.get("quantization_config") is not None:
            raise LabError(f"{name} is quantized, so its weights cannot be trained; expected a model that is not")
        if kind == "llama":
            values["shift_targets"] = []
        config = found if isinstance(found, _RETROFITTED) else KVShiftLlamaConfig(**values)
    except LabError as error:
        raise LabError(f"init_from: {str(error).removeprefix('model: ')}") from error
    except Exception as error:  # the hub, and transformers' strict dataclasses, raise classes of their own
        raise LabError(
            f"init_from: the configuration of {name} cannot be read: {' '.join(str(error).split())}"
        ) from error
    return Pretrained(name, folder, tokenizer, config)


def fitting_config(source: Pretrained, options: ModelConfig, *, vocab_size: int, sequence_length: int) -> Any:
    """Return the configuration of the model to start from, for a run with this vocabulary and sequence length.

    Raises:
        LabError: an option contradicts the model, or the data do not fit it. The message names both.
    """
    if isinstance(source.config, KVShiftLlamaConfig):
        base = base_config(source, options)
        return llama_config(options, vocab_size=vocab_size, sequence_length=sequence_length, base=base)
    for one in fields(options):
        given = getattr(options, one.name)
        if given != one.default and one.name not in ("freeze_shift", "freeze_shift_lags"):
            raise LabError(
                f"model.{one.name} is {given!r}, but the model of init_from ({source.name}) is used unchanged: leave "
                "the option out"
            )
    config: Any = deepcopy(source.config)
    if config.vocab_size < vocab_size:
        raise LabError(f"init_from: {source.name} has {config.vocab_size} tokens, but its tokenizer {vocab_size}")
    if config.max_position_embeddings < sequence_length:
        raise LabError(
            f"data.sequence_length is {sequence_length}, but the model of init_from ({source.name}) has "
            f"{config.max_position_embeddings} positions"
        )
    # As in `llama_config`: generation must not stop at, or pad with, the ids of another tokenizer.
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return config


def base_config(source: Pretrained, options: ModelConfig) -> dict[str, Any]:
    """Return the configuration of the model to start from; if it has no shift, add the one that `options` specify.

    Raises:
        LabError: an option contradicts the model. The message names both.
    """
    for name in ("size", "config"):
        if getattr(options, name) is not None:
            raise LabError(
                f"model.{name} ({getattr(options, name)}) and init_from ({source.name}) cannot both be given: each "
                "defines the whole model"
            )
    if options.zero_outputs:
        raise LabError(f"model.zero_outputs sets initial weights, but init_from ({source.name}) provides all of them")
    if options.variant is not None:
        raise LabError(f"model.variant is {options.variant!r}, but init_from supports only vanilla and kv-shift")
    config: Any = source.config
    rope = cast(dict[str, Any], config.rope_parameters)
    shift = ("shift_targets", "shift_window", "shift_constraint", "shift_init")
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    others = ("vocab_size", "tie_word_embeddings", "qk_norm", "attention_bias", "sliding_window")
    has = {name: getattr(config, name) for name in (*shape, *others, *shift)}
    has |= {"rope_theta": rope["rope_theta"], "shift_targets": tuple(config.shift_targets)}
    base = config.to_dict()
    if not config.shift_targets:
        base |= _added_shift(source, options)
        has = {name: value for name, value in has.items() if name not in shift}
    for name, value in has.items():
        given = getattr(options, name)
        if given is not None and given != value:
            raise LabError(
                f"model.{name} is {given!r}, but the model of init_from ({source.name}) has {value!r}: leave the "
                "option out, or train without init_from"
            )
    for name in ("model_type", "architectures", "dtype", "_name_or_path", "layer_types", "transformers_version"):
        base.pop(name, None)
    return base


def load_pretrained(source: Pretrained, config: Any) -> Any:
    """Load the model in float32. An added shift is initialised to the identity, which does not change its outputs.

    Args:
        source: the model with the weights.
        config: configuration of the model, from `fitting_config`.
    """
    try:
        with without_report():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
    except MODEL_CONFIG_ERRORS as error:
        raise LabError(f"init_from: the weights of {source.name} cannot be loaded: {error}") from error
    model, report = loaded
    family = config.model_type.removeprefix("kvshift_").capitalize()
    added = set() if source.config.shift_targets else {name for name in report["missing_keys"] if ".shift." in name}
    for keys, what in (
        (report["missing_keys"] - added, "lacks {} weights"),
        (report["unexpected_keys"], f"has {{}} weights that {family} does not have"),
    ):
        if keys:
            raise LabError(f"init_from: {source.name} {what.format(len(keys))}, such as {min(keys)}")
    if (name := first_non_finite_parameter(model)) is not None:
        raise LabError(f"init_from: {source.name}: {name} has numbers that are not finite, as after a diverged run")
    # Drop a saved temperature, penalties, and end tokens of another tokenizer.
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def with_tokenizer(source: Pretrained, data: DataConfig) -> DataConfig:
    """Return the data options with the model's tokenizer, the only one that fits it."""
    if data.tokenizer not in (None, source.tokenizer):
        raise LabError(
            f"data.tokenizer is {data.tokenizer!r}, but the model of init_from ({source.name}) has its own, "
            f"{source.tokenizer!r}: leave the option out, or train without init_from"
        )
    return replace(data, tokenizer=source.tokenizer)


def _added_shift(source: Pretrained, options: ModelConfig) -> dict[str, Any]:
    """Return the configuration fields of a shift added to a model without one; it is initialised to the identity."""
    if options.shift_targets == ():
        return {}
    if options.shift_targets is None:
        for name in ("shift_window", "shift_constraint", "shift_init"):
            if getattr(options, name) is not None:
                raise LabError(
                    f"model.{name} is {getattr(options, name)!r}, but the model of init_from ({source.name}) has no "
                    "shift: give model.shift_targets to add one"
                )
        return {}
    if options.shift_constraint == "gate":
        raise LabError(
            f"model.shift_constraint is 'gate', but the model of init_from ({source.name}) has no shift, and a gate "
            "cannot be initialised to the identity; expected free or clamp"
        )
    if options.shift_init == "uniform":
        raise LabError(
            f"model.shift_init is 'uniform', but the model of init_from ({source.name}) has no shift, and a random "
            "one would change its outputs; expected identity"
        )
    return {"shift_init": "identity"}
