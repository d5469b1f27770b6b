"""The class of all model variants, and the two variants that every family has: vanilla and KV shift.

`by_name` lists all variants and the modules whose `MODEL_VARIANTS` contain them. A size is a configuration of one
family, as returned by `building.describe`: a `KVShiftLlamaConfig` (text and tasks), or a `LabGPT2Config` or
`EncoderConfig` (tasks).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, set_seed

from kvshift import KVShift
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.seeds import generator_for, seed_for
from kvshift_lab.variants.bidirectional import EncoderConfig, LabEncoder
from kvshift_lab.variants.small_gpt2 import LabGPT2, LabGPT2Config
from kvshift_lab.variants.uncached import decodes_with_cache

Size = KVShiftLlamaConfig | LabGPT2Config | EncoderConfig

# The model class of each family, by its configuration class. Without shift, it is the vanilla model of that family.
MODEL_CLASSES: Mapping[type[PreTrainedConfig], type[PreTrainedModel]] = {
    KVShiftLlamaConfig: KVShiftLlamaForCausalLM,
    LabGPT2Config: LabGPT2,
    EncoderConfig: LabEncoder,
}


@dataclass(frozen=True, kw_only=True)
class ModelVariant:
    """A kind of model that experiments compare with others, independent of its size.

    It has one model class per family, whose `config_class` is that of the family or a subclass of it. The classes are
    registered with transformers' Auto classes, which can then load saved models of the variant.

    Attributes:
        name: the name of the variant in `by_name`.
        models: model class for each configuration class of a family. A class that cannot decode with a cache has the
            attribute `decodes_with_cache = False`, as `UncachedGeneration` does.
        fields: configuration fields that the variant sets in place of the size's, such as those that control caches.
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
        """Build a model with float32 initial values.

        Every weight that the vanilla model of the same seed also has is initialised with the same bits: weights are
        drawn for the vanilla model and copied wherever name and shape agree.

        Args:
            size: configuration of the model; its fields `shift_*` configure the shift, with no targets for none.
            seed: random seed of all weights; weights that vanilla lacks are drawn from separate random streams.

        Raises:
            LabError: the variant has no model for this family, or it cannot be built at this size.
        """
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
        """Return how many more parameters the model has than vanilla (negative: fewer), without creating weights."""
        model_class, config = self._described(size)
        with torch.device("meta"):
            pair = _made(self.name, model_class, config), MODEL_CLASSES[type(size)](_without_shift(size))
        ours, vanilla = (sum(parameter.numel() for parameter in model.parameters()) for model in pair)
        return ours - vanilla

    def _described(self, size: Size) -> tuple[Any, Any]:
        """Return the class of the model and its configuration."""
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


# The family's model without shift (for Llamas, this is transformers' Llama), and KV shift with all its options, which
# are fields of the size: targets, window, constraint and initial values.
MODEL_VARIANTS = (ModelVariant(name="vanilla"), ModelVariant(name="kv-shift"))


def shift_layers(model: nn.Module) -> list[KVShift]:
    """Return the `KVShift` of each layer that has targets and one set of coefficients per head, in order."""
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
