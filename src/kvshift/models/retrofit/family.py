"""What a family of models tells so that its models can be given a shift, and how they are given it.

A model is converted where it stands: its modules keep their weights, hooks and places and become, by class, those of
the family with shift; each attention gets a `KVShift`. So one path serves a loaded model and one built from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from kvshift.layers import KVShift, ShiftOptions
from kvshift.models.configuration import ShiftConfig


class RetrofitConfig(ShiftConfig):
    """A `ShiftConfig` of a model that `add_kv_shift` makes."""

    loaded_by: ClassVar[str] = "kvshift.models.retrofit.load_kv_shift"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type of transformers and its counterpart with shift."""

    config: type[PreTrainedConfig]
    """Configuration with shift: a `RetrofitConfig` and the model type's own."""
    attention: tuple[type[nn.Module], type[nn.Module]]
    """Attention of transformers, and its subclass that shifts by its attribute `shift`."""
    models: Mapping[type[PreTrainedModel], type[PreTrainedModel]]
    """Models of transformers and their subclasses with shift: the decoder and those with a head."""
    heads: Callable[[Any], tuple[int, int]]
    """From a configuration: query heads and KV heads of a layer."""
    refuse: Callable[[Any], None] = field(default=lambda config: None)
    """Raises a ValueError for a configuration of which the family has no counterpart with shift."""


def shifted_config(config: PreTrainedConfig, family: Family, options: ShiftOptions) -> Any:
    """A configuration like `config`, with shift. `config` may belong to other models too and stays as it is."""
    new: Any = deepcopy(config)
    new.__class__ = family.config
    for name, value in options.as_fields().items():
        setattr(new, name, value)
    return new


def convert(model: PreTrainedModel, family: Family, config: Any) -> None:
    """Give every attention of `model` a shift, in place. Weights stay as they are, bit for bit.

    Args:
        model: of one of the family's classes, with shift or without.
        family: of the model.
        config: with shift.
    """
    plain_attention, attention = family.attention
    heads, kv_heads = family.heads(config)
    old = model.config
    for module in list(model.modules()):
        if getattr(module, "config", None) is old:
            module.config = config  # type: ignore[assignment]
        if type(module) is plain_attention:
            module.__class__ = attention
            device = next(module.parameters()).device
            shift = KVShift(kv_heads, ShiftOptions.of(config), num_heads=heads, device=device)
            module.shift = shift.train(module.training)
        elif type(module) in family.models:
            module.__class__ = family.models[type(module)]
            assert isinstance(module, PreTrainedModel)
            note_class(module)


def note_class(model: PreTrainedModel) -> None:
    """What a constructor of transformers notes about the class of its model."""
    model._keep_in_fp32_modules_strict = set(type(model)._keep_in_fp32_modules_strict or ())
    # By the name of the class; without it, output_hidden_states and output_attentions are not heeded.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)
