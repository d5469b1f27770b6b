"""The description of a model family, and the conversion of its models to models with shift.

A model is converted in place: its modules keep their weights, hooks and names, and their classes are replaced by the
family's classes with shift; each attention gets a `KVShift`. The same code serves loaded and newly built models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from itertools import chain
from types import ModuleType
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from kvshift.layers import KVShift, ShiftOptions
from kvshift.models.configuration import ShiftConfig
from kvshift.models.decoder import RotaryDecoder, ShiftedAttention, ShiftedPreTrainedModel
from kvshift.models.generation import ShiftedGeneration
from kvshift.models.registration import register_model_type


class RetrofitConfig(ShiftConfig):
    """A `ShiftConfig` for models made by `add_kv_shift`."""

    loaded_by: ClassVar[str] = "kvshift.models.retrofit.load_kv_shift"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type of transformers and its counterpart with shift."""

    config: type[PreTrainedConfig]
    """Configuration class with shift: a subclass of `ShiftConfig` and of the model type's own configuration."""
    attention: tuple[type[nn.Module], type[nn.Module]]
    """Attention class of transformers, and its subclass that shifts with its attribute `shift`."""
    models: Mapping[type[PreTrainedModel], type[PreTrainedModel]]
    """Model classes of transformers, the decoder and those with a head, mapped to their subclasses with shift."""
    heads: Callable[[Any], tuple[int, int]] = lambda config: (config.num_attention_heads, config.num_key_value_heads)
    """Function from a configuration to the numbers of query heads and KV heads of a layer."""
    bias: bool | None = None
    """Whether the query, key and value projections have a bias; None: as `attention_bias` of the configuration says."""
    output_bias: bool | None = None
    """Whether the output projection has a bias; None: as `attention_bias` of the configuration says."""
    qk_norm: bool = False
    """Whether queries and keys are normalised after the shift; a `qk_norm` in the configuration takes precedence."""
    refuse: Callable[[Any], None] = field(default=lambda config: None)
    """Function that raises a ValueError for a configuration that the family does not support with shift."""

    def __post_init__(self) -> None:
        for model in self.models.values():
            model.family = self  # type: ignore[attr-defined]


class Retrofitted(ShiftedPreTrainedModel):
    """A mixin that builds a model as its family does and then adds the shift."""

    family: ClassVar[Family]

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        self.family.refuse(config)
        super().__init__(config)  # type: ignore[call-arg]
        convert(self, self.family, config)  # type: ignore[arg-type]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the names that `save_pretrained` writes, from which `Trainer` resumes: GPT-NeoX's head."""
        conversions = get_checkpoint_conversion_mapping(type(self).__name__) or []
        for renaming in (each for each in conversions if isinstance(each, WeightRenaming)):
            for key in list(state_dict):
                name = prefix + renaming.rename_source_key(key.removeprefix(prefix))[0]
                if name not in state_dict:
                    state_dict[name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class RetrofittedDecoder(RotaryDecoder, Retrofitted):
    """A mixin for the decoder of a rotary family, whose layers get the family's own rotary tables."""

    rotates_halves = False


def rotary_family(
    modeling: ModuleType,
    *names: str,
    attention: type[ShiftedAttention] = ShiftedAttention,
    decoder: type[RotaryDecoder] = RetrofittedDecoder,
    qk_norm: bool = False,
    llama_norm: type[nn.Module] | None = None,
    **more: Any,
) -> Family:
    """Create a family with rotary embedding, whose classes combine `models/decoder.py` with classes of transformers.

    Args:
        modeling: the family's module in transformers, whose rotary embedding and eager attention are used.
        names: names of its attention class, its decoder class, and its model classes with a head.
        attention: mixin listed before the family's attention class, for example to change how it projects.
        decoder: mixin listed before the family's decoder class.
        qk_norm: as in `Family`.
        llama_norm: as in `ShiftedAttention`.
        more: other fields of `Family`.
    """
    plain_attention, plain_decoder, *plain_heads = (getattr(modeling, name) for name in names)
    bases: dict[Any, tuple[type, ...]] = {plain_decoder: (decoder,)}
    bases |= {plain: ((ShiftedGeneration,) if plain.can_generate() else ()) + (Retrofitted,) for plain in plain_heads}
    config = _config_with_shift(plain_decoder.config_class)
    of_model = {"config_class": config, "has_llama_layers": llama_norm is not None}
    members = {
        "qk_norm": qk_norm,
        "llama_norm": llama_norm,
        "eager_attention": staticmethod(modeling.eager_attention_forward),
        "apply_rotary": staticmethod(modeling.apply_rotary_pos_emb),
    }
    return Family(
        config=config,
        attention=(plain_attention, _with_shift(plain_attention, (attention,), members)),
        models={plain: _with_shift(plain, before, of_model) for plain, before in bases.items()},
        qk_norm=qk_norm,
        **more,
    )


def register(family: Family) -> None:
    """Register a family's classes where transformers and its neighbours look models up."""
    (stock, *_) = family.models
    register_model_type(family.config, family.models.values(), like=stock.config_class.model_type)
    # The names of weights that transformers converts on loading, and back on saving: it does so by the name of a class.
    for plain, with_shift in family.models.items():
        conversions = get_checkpoint_conversion_mapping(plain.__name__)
        if conversions is not None:
            register_checkpoint_conversion_mapping(with_shift.__name__, conversions, overwrite=True)


def _with_shift(plain: type, before: tuple[type, ...], members: dict[str, Any]) -> Any:
    """Create the class KVShiftX from a class X, with the base classes `before` listed before X."""
    name, about = f"KVShift{plain.__name__}", f"`transformers.{plain.__name__}` with KV shift."
    made = type(name, (*before, plain), {"__module__": __name__, "__doc__": about, **members})
    globals()[name] = made  # where pickle looks for it
    return made


def _config_with_shift(plain: type[PreTrainedConfig]) -> Any:
    members: dict[str, Any] = {"model_type": f"kvshift_{plain.model_type}"}
    if any(one.name == "layer_types" for one in fields(plain)):  # keep the family's own field, not the property
        members |= {"__annotations__": {"layer_types": list[str] | None}, "layer_types": None}
    return strict(_with_shift(plain, (RetrofitConfig,), members))


def shifted_config(config: PreTrainedConfig, family: Family, options: ShiftOptions) -> Any:
    """Return a copy of `config` with shift. `config` itself, which other models may share, is not changed.

    Its attributes that the class of the model does not read, such as a Llama's `sliding_window`, stay without effect.
    """
    new: Any = deepcopy(config)
    new.__class__ = family.config
    own = {one.name for one in fields(type(config))}
    for name in {"layer_types", "sliding_window"} - own:  # no fields here either, but read by masks and caches
        vars(new).pop(name, None)
    defaults = {one.name: one.default for one in fields(family.config) if one.name not in own}
    for name, value in (defaults | options.as_fields()).items():
        setattr(new, name, value)
    return new


def convert(model: PreTrainedModel, family: Family, config: Any) -> None:
    """Give every attention of `model` a shift, in place. Weights stay the same, bit for bit.

    Args:
        model: a model of one of the family's classes, with or without shift.
        family: the family of the model.
        config: the configuration with shift.

    Raises:
        ValueError: an attention or the decoder is of a class that the family does not know; nothing has changed then.
    """
    _require_known_classes(model, family)
    plain_attention, attention = family.attention
    heads, kv_heads = family.heads(config)
    old = model.config
    for module in list(model.modules()):
        if getattr(module, "config", None) is old:
            module.config = config  # type: ignore[assignment]
        if type(module) is plain_attention:
            module.__class__ = attention
            tensors = chain(module.parameters(), module.buffers())  # quantized weights may be buffers
            device = next(tensors, model).device
            add_child(module, "shift", KVShift(kv_heads, ShiftOptions.of(config), num_heads=heads, device=device))
        elif type(module) in family.models:
            module.__class__ = family.models[type(module)]
            assert isinstance(module, PreTrainedModel)
            register_model_class(module)


def _require_known_classes(model: PreTrainedModel, family: Family) -> None:
    """Raise a ValueError unless the decoder and every attention have a class that `convert` replaces.

    In a decoder of another class, documents and padding would not reach the shift; another attention would have none.
    """
    plain, base = family.attention[0], model.base_model
    with_shift = (family.attention[1], *family.models.values())
    named = [(name, each) for name, each in model.named_modules() if each is base or isinstance(each, plain)]
    for name, module in named:
        kind = type(module)
        if kind is not plain and kind not in family.models and not isinstance(module, with_shift):
            raise ValueError(
                f"model has a {kind.__module__}.{kind.__qualname__} as {name or 'its decoder'}, not a class of "
                "transformers that add_kv_shift supports"
            )
    if len(named) == 1 and model.config.num_hidden_layers > 0:
        raise ValueError(f"model has no {plain.__module__}.{plain.__name__}, to which the shift could be added")


def add_child(parent: nn.Module, name: str, child: nn.Module) -> None:
    """Add a child to a module of a finished model, with the module's training mode and initialisation mark.

    With that mark of transformers, the weights of the child are not initialised again by the `post_init` of a model
    that contains this one. (While `from_pretrained` builds a model, no module has the mark.)
    """
    for module in child.modules():
        module._is_hf_initialized = getattr(parent, "_is_hf_initialized", False)  # type: ignore[assignment]
    setattr(parent, name, child.train(parent.training))


def register_model_class(model: PreTrainedModel) -> None:
    """Record what a constructor of transformers records about the class of its model."""
    model._keep_in_fp32_modules_strict = set(type(model)._keep_in_fp32_modules_strict or ())
    # The key is the name of the class; without the entry, output_hidden_states and output_attentions have no effect.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)
