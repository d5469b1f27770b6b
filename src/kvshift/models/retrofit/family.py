"""What a family of models tells so that its models can be given a shift, and how they are given it.

A model is converted where it stands: its modules keep their weights, hooks and places and become, by class, those of
the family with shift; each attention gets a `KVShift`. So one path serves a loaded model and one built from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from kvshift.layers import KVShift, ShiftOptions
from kvshift.models.configuration import ShiftConfig
from kvshift.models.decoder import RotaryDecoder, ShiftedAttention, ShiftedPreTrainedModel
from kvshift.models.generation import ShiftedGeneration

_AUTO = {"ForSequenceClassification": AutoModelForSequenceClassification, "LMHeadModel": AutoModelForCausalLM}
_AUTO |= {"ForCausalLM": AutoModelForCausalLM, "Model": AutoModel}


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
    heads: Callable[[Any], tuple[int, int]] = lambda config: (config.num_attention_heads, config.num_key_value_heads)
    """From a configuration: query heads and KV heads of a layer."""
    bias: bool | None = None
    """Whether the projections of queries, keys and values have a bias; None: where `attention_bias` says so."""
    output_bias: bool | None = None
    """Whether the projection of the output has one; None: likewise."""
    qk_norm: bool = False
    """Whether queries and keys are normalised after the shift; a configuration that has a `qk_norm` says so itself."""
    refuse: Callable[[Any], None] = field(default=lambda config: None)
    """Raises a ValueError for a configuration of which the family has no counterpart with shift."""

    def __post_init__(self) -> None:
        for model in self.models.values():
            model.family = self  # type: ignore[attr-defined]


class Retrofitted(ShiftedPreTrainedModel):
    """A model built as its family builds it, and then given a shift."""

    family: ClassVar[Family]

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        self.family.refuse(config)
        super().__init__(config)  # type: ignore[call-arg]
        convert(self, self.family, config)  # type: ignore[arg-type]


class RetrofittedDecoder(RotaryDecoder, Retrofitted):
    """A rotary family's decoder, whose layers get the tables of the family itself."""

    def rotary_tables(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary_emb(hidden_states, position_ids=position_ids)


def rotary_family(
    modeling: ModuleType,
    *names: str,
    attention: type[ShiftedAttention] = ShiftedAttention,
    decoder: type[RotaryDecoder] = RetrofittedDecoder,
    qk_norm: bool = False,
    **more: Any,
) -> Family:
    """A family with rotary embedding on the bodies of `models/decoder.py`, and its classes.

    Args:
        modeling: transformers' module of the family, whose rotary embedding and eager attention are used.
        names: of its attention, of its decoder, and of its models with a head.
        attention: what stands before the family's attention, such as how it projects.
        decoder: what stands before the family's decoder.
        qk_norm: of `Family`.
        more: other fields of `Family`.
    """
    plain_attention, plain_decoder, *plain_heads = (getattr(modeling, name) for name in names)
    bases: dict[Any, tuple[type, ...]] = {plain_decoder: (decoder,)}
    bases |= {plain: ((ShiftedGeneration,) if plain.can_generate() else ()) + (Retrofitted,) for plain in plain_heads}
    config = _config_with_shift(plain_decoder.config_class)
    members = {
        "qk_norm": qk_norm,
        "eager_attention": staticmethod(modeling.eager_attention_forward),
        "apply_rotary": staticmethod(modeling.apply_rotary_pos_emb),
    }
    return Family(
        config=config,
        attention=(plain_attention, _with_shift(plain_attention, (attention,), members)),
        models={plain: _with_shift(plain, before, {"config_class": config}) for plain, before in bases.items()},
        qk_norm=qk_norm,
        **more,
    )


def register(family: Family) -> None:
    """Make a family's classes those that transformers' Auto classes choose for its configuration."""
    AutoConfig.register(family.config.model_type, family.config, exist_ok=True)
    for model in family.models.values():
        auto_class(model).register(family.config, model, exist_ok=True)


def auto_class(model: type[PreTrainedModel]) -> Any:
    """The Auto class of transformers that chooses a family's model."""
    return next(auto for ending, auto in _AUTO.items() if model.__name__.endswith(ending))


def _with_shift(plain: type, before: tuple[type, ...], members: dict[str, Any]) -> Any:
    """The class KVShiftX of a class X: `before` stands before it."""
    name, about = f"KVShift{plain.__name__}", f"`transformers.{plain.__name__}` with KV shift."
    made = type(name, (*before, plain), {"__module__": __name__, "__doc__": about, **members})
    globals()[name] = made  # where pickle looks for it
    return made


def _config_with_shift(plain: type[PreTrainedConfig]) -> Any:
    members: dict[str, Any] = {"model_type": f"kvshift_{plain.model_type}"}
    if any(one.name == "layer_types" for one in fields(plain)):  # the family's own field, in place of the property
        members |= {"__annotations__": {"layer_types": list[str] | None}, "layer_types": None}
    return strict(_with_shift(plain, (RetrofitConfig,), members))


def shifted_config(config: PreTrainedConfig, family: Family, options: ShiftOptions) -> Any:
    """A configuration like `config`, with shift. `config` may belong to other models too and stays as it is."""
    new: Any = deepcopy(config)
    new.__class__ = family.config
    missing = {one.name: one.default for one in fields(family.config) if one.name not in vars(new)}
    for name, value in (missing | options.as_fields()).items():
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
            add_child(module, "shift", KVShift(kv_heads, ShiftOptions.of(config), num_heads=heads, device=device))
        elif type(module) in family.models:
            module.__class__ = family.models[type(module)]
            assert isinstance(module, PreTrainedModel)
            note_class(module)


def add_child(parent: nn.Module, name: str, child: nn.Module) -> None:
    """Set an attribute of a module in a finished model, in its mode and as initialised as it is.

    By that mark of transformers `post_init`, which a model that takes this one in calls again, leaves the child's
    numbers as they are. (While `from_pretrained` builds a model, no module has it.)
    """
    for module in child.modules():
        module._is_hf_initialized = getattr(parent, "_is_hf_initialized", False)  # type: ignore[assignment]
    setattr(parent, name, child.train(parent.training))


def note_class(model: PreTrainedModel) -> None:
    """What a constructor of transformers notes about the class of its model."""
    model._keep_in_fp32_modules_strict = set(type(model)._keep_in_fp32_modules_strict or ())
    # By the name of the class; without it, output_hidden_states and output_attentions are not heeded.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)
