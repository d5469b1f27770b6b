"""`add_kv_shift` adds KV shift to a loaded model; `load_kv_shift` loads such a model from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from kvshift.layers import KVShift, ShiftOptions
from kvshift.models.retrofit.families import FAMILIES
from kvshift.models.retrofit.family import Family, convert, shifted_config
from kvshift.models.versions import warn_if_untested

Model = TypeVar("Model", bound=PreTrainedModel)

# Options of `from_pretrained` that say where files are, including that of the configuration.
_SOURCE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def add_kv_shift(model: Model, options: ShiftOptions = ShiftOptions(init="identity")) -> Model:
    """Add a shift of keys and values to every self-attention of a transformers model, in place.

    With init="identity", the outputs stay the same, bit for bit, until the coefficients are trained. (On a CPU, this
    needs head sizes that are a multiple of 4, as in pretrained models; the rounding of other matrix products depends on
    the layout of their operands.) The coefficients are float32 in a model of any dtype; exclude them from weight
    decay: see `kvshift.param_groups`. Weights keep their tensors and names. The coefficients are placed beside them,
    in GPT-2 as `attn.shift.alpha` and `attn.shift.beta`. The model changes its class (GPT2LMHeadModel becomes
    KVShiftGPT2LMHeadModel, a subclass) and its configuration.

    A decoder inside another model can get the shift, but only the decoder's own `save_pretrained` marks its folder: to
    load the other model, build it, add the shift, and load the weights.

    Args:
        model: a model of a class in `FAMILIES`, as returned by `from_pretrained` or its constructor, before
            `torch.compile`, PEFT, FSDP or a `device_map`. The coefficients of a model that has adapters of PEFT
            already are frozen, as its other weights are.
        options: what to shift, and how; `init="uniform"` draws from the global random generator.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a model of transformers.
        ValueError: the model already has a shift, or its class or configuration is not supported (for example
            cross-attention). The model is then unchanged.
    """
    warn_if_untested()
    if not isinstance(options, ShiftOptions):
        raise TypeError(f"options must be ShiftOptions, got {type(options).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    shifts = [module for module in model.modules() if isinstance(module, KVShift)]
    if shifts:
        idle = (
            "" if shifts[0].targets else ", which shifts nothing: load it with other shift_targets in its configuration"
        )
        raise ValueError(f"model already has a KV shift: {type(model).__name__}{idle}")
    family = _family_of(model)
    family.refuse(model.config)
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ValueError(
                f"model has a hook in place of {name or 'its own'}.forward, as from a device_map with several devices: "
                "add the shift before the model is spread over devices"
            )
    config = shifted_config(model.config, family, options)
    convert(model, family, config)
    vars(model).pop("name_or_path", None)  # PEFT's adapters would name it as their base, which has no shift
    if hasattr(model, "peft_config"):  # adapters are trained and saved alone
        for module in model.modules():
            if isinstance(module, KVShift):
                module.requires_grad_(False)
    return model


def load_kv_shift(folder: str | Path, **options: Any) -> PreTrainedModel:
    """Load a model with shift from a folder, or a repository on the hub, that `save_pretrained` wrote.

    Args:
        folder: folder or hub name of the model. The loaded model has the class that was saved.
        options: passed to `from_pretrained`.

    Raises:
        ValueError: the folder does not hold a model made by `add_kv_shift`.
    """
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        source = {name: options[name] for name in _SOURCE_OPTIONS if name in options}
        config = AutoConfig.from_pretrained(folder if config is None else config, **source)
    classes = {shifted.__name__: shifted for family in FAMILIES for shifted in family.models.values()}
    name = (getattr(config, "architectures", None) or ["none"])[0]
    if name not in classes or not isinstance(config, classes[name].config_class):
        known = ", ".join(classes)
        raise ValueError(
            f"{folder} is not a model with a shift from add_kv_shift: its model_type is {config.model_type!r}, its "
            f"class {name}; known: {known}"
        )
    return classes[name].from_pretrained(folder, **options)


def _family_of(model: PreTrainedModel) -> Family:
    for family in FAMILIES:
        if type(model) in family.models:
            return family
    known = ", ".join(plain.__name__ for family in FAMILIES for plain in family.models)
    kind = getattr(getattr(model, "config", None), "model_type", "none")
    raise ValueError(
        f"model is a {type(model).__name__} (model_type {kind!r}), which add_kv_shift does not support; "
        f'supported: {known}. To add a family, see CONTRIBUTING.md, "A model family"'
    )
