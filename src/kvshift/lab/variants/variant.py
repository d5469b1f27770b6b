"""What an experiment compares: one protocol, behind which vanilla, KV shift and the baselines stand.

`by_name` lists them and the modules whose `MODEL_VARIANTS` they are. A size is the configuration of a family, as
`building.describe` makes it: a `KVShiftLlamaConfig` (text and tasks), or a `LabGPT2Config` or `EncoderConfig` (tasks).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, set_seed

from kvshift.lab.core.errors import LabError
from kvshift.lab.core.seeds import generator_for, seed_for
from kvshift.lab.variants.bidirectional import EncoderConfig, LabEncoder
from kvshift.lab.variants.small_gpt2 import LabGPT2, LabGPT2Config
from kvshift.lab.variants.uncached import decodes_with_cache
from kvshift.layers import KVShift
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

Size = KVShiftLlamaConfig | LabGPT2Config | EncoderConfig

# By the configuration of a family: the model that every variant shares weights with, once nothing in it shifts.
MODEL_CLASSES: Mapping[type[PreTrainedConfig], type[PreTrainedModel]] = {
    KVShiftLlamaConfig: KVShiftLlamaForCausalLM,
    LabGPT2Config: LabGPT2,
    EncoderConfig: LabEncoder,
}


class Variant(Protocol):
    """What an experiment compares: a model of one kind, whatever its size."""

    def build(self, size: Size, *, seed: int) -> PreTrainedModel:
        """A model with float32 start values; every weight that its vanilla twin has too has the same bits for a seed.

        Args:
            size: of the model; its fields `shift_*` say what its layers shift, () for what shifts nothing.
            seed: of all weights; those that vanilla does not have come from generators of their own.

        Raises:
            LabError: there is no such model of this family.
        """
        ...

    def added_parameters(self, size: Size) -> int:
        """How many parameters it has more than vanilla, less being negative; nothing is drawn."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelVariant:
    """A variant that is a model class for each family; its `config_class` is that of the family, or a subclass.

    The classes are registered with transformers' Auto classes, so that what is saved is loaded by them.

    Attributes:
        name: as in `by_name`.
        models: by the configuration of the family; one that decodes without a cache says so, as `UncachedGeneration`.
        fields: of their configurations, other than those of the size: what caches keep, say.
    """

    name: str
    models: Mapping[type[PreTrainedConfig], type[PreTrainedModel]] = field(default_factory=lambda: MODEL_CLASSES)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for model_class in self.models.values():
            config_class: Any = model_class.config_class
            AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
            AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)

    def build(self, size: Size, *, seed: int) -> PreTrainedModel:
        """See `Variant`. The weights are drawn for vanilla and taken over where name and shape are the same."""
        model_class, config = self._described(size)
        set_seed(seed)
        vanilla = MODEL_CLASSES[type(size)](_without_shift(size))
        if model_class is type(vanilla) and not config.shift_targets:
            return vanilla
        set_seed(seed_for(f"{self.name} parameters", seed))
        model = _made(self.name, model_class, config)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        shared = {name: tensor for name, tensor in vanilla.state_dict().items() if shapes.get(name) == tensor.shape}
        model.load_state_dict(shared, strict=False, assign=True)
        model.tie_weights()
        generator = generator_for("shift coefficients", seed)
        for layer in shift_layers(model):
            layer.reset_parameters(generator)
        return model

    def added_parameters(self, size: Size) -> int:
        """See `Variant`."""
        model_class, config = self._described(size)
        with torch.device("meta"):
            pair = _made(self.name, model_class, config), MODEL_CLASSES[type(size)](_without_shift(size))
        ours, vanilla = (sum(parameter.numel() for parameter in model.parameters()) for model in pair)
        return ours - vanilla

    def _described(self, size: Size) -> tuple[Any, Any]:
        """The class of the model, and its configuration."""
        if type(size) not in self.models:
            others = ", ".join(sorted(family.model_type for family in self.models))
            raise LabError(
                f"model.variant {self.name} does not support model_type {size.model_type}; it supports {others}"
            )
        model_class: Any = self.models[type(size)]
        config = deepcopy(size)
        config.__class__ = model_class.config_class
        config.use_cache = config.use_cache and decodes_with_cache(model_class)
        for name, value in self.fields.items():
            setattr(config, name, deepcopy(value))
        return model_class, config


# The family's own model, where nothing shifts (of the Llamas transformers' Llama), and KV shift with all its options,
# which are fields of a size: what is shifted, window, constraint and start values.
MODEL_VARIANTS = (ModelVariant(name="vanilla"), ModelVariant(name="kv-shift"))


def shift_layers(model: nn.Module) -> list[KVShift]:
    """The `KVShift` of each layer that shifts anything by numbers for each head, in order."""
    found = [module for module in model.modules() if isinstance(module, KVShift) and module.targets]
    return [module for module in found if getattr(module, "per_head", True)]


def _made(name: str, model_class: Any, config: Any) -> PreTrainedModel:
    try:
        return model_class(config)
    except ValueError as error:
        raise LabError(f"model.variant {name} cannot be built at this size: {error}") from error


def _without_shift(size: Size) -> Size:
    size = deepcopy(size)
    size.shift_targets = []
    return size
