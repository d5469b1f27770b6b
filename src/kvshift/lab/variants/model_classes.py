"""The model classes of variants, made from those of the families.

A variant is written once for all families: as a class that stands before that of a part of a model (`prepend_class`),
and as a function that changes a finished model in place (`variant_class`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel

from kvshift.models.retrofit.family import note_class


class NamedConfig:
    """Stands before the configuration of a family; what it saves is refused by the classes of other models.

    `use_cache` of what is saved is of a type that they do not take, and names `loaded_by`.
    """

    loaded_by: ClassVar[str]
    use_cache: bool | dict[str, bool]

    def to_dict(self) -> dict[str, Any]:
        """Of transformers; what is saved."""
        saved = super().to_dict()  # type: ignore[misc]
        saved["use_cache"] = {f"kv_shift: load it with {self.loaded_by}": self.use_cache}
        return saved


def prepend_class(module: nn.Module, before: type) -> None:
    """Let a class stand before that of a module, in place: weights, names and hooks stay."""
    module.__class__ = _combined(before, type(module))
    if isinstance(module, PreTrainedModel):
        note_class(module)


def variant_class(
    base: Any,
    stem: str,
    change: Callable[[Any], None],
    *,
    before: tuple[type, ...] = (),
    config_before: type = NamedConfig,
    fields: Mapping[str, tuple[Any, Any]] | None = None,
) -> Any:
    """The class of a variant's models in one family, with a configuration of its own as `config_class`.

        base KVShiftLlamaForCausalLM    SmearLlamaForCausalLM, SmearLlamaConfig, model type kvshift_smear_llama
        base LabGPT2                    SmearGPT2, SmearGPT2Config, model type kvshift_smear_lab_gpt2

    Args:
        base: the model class of the family.
        stem: what the names begin with, such as "Smear".
        change: makes a finished model of the family one of the variant; the classes belong to its module.
        before, config_before: what stands before the family's model class, and before its configuration.
        fields: types and defaults of the fields that the configuration has beside those of the family.
    """
    name, config_name = (
        stem + each.__name__.removeprefix("KVShift").removeprefix("Lab") for each in (base, base.config_class)
    )
    module, fields = change.__module__, fields or {}

    def build(self: Any, config: Any) -> None:
        base.__init__(self, config)
        change(self)

    members = {
        "model_type": base.config_class.model_type.replace("kvshift", f"kvshift_{stem.lower()}"),
        "loaded_by": f"{module}.{name}",
        "__annotations__": {field: kind for field, (kind, _) in fields.items()},
        **{field: default for field, (_, default) in fields.items()},
    }
    config_class = strict(_made(config_name, (config_before, base.config_class), module, members))
    return _made(name, (*before, base), module, {"__init__": build, "config_class": config_class})


@cache
def _combined(before: type, plain: type) -> Any:
    return _made(f"{before.__name__}{plain.__name__}", (before, plain), before.__module__, {})


def _made(name: str, bases: tuple[type, ...], module: str, members: Mapping[str, Any]) -> Any:
    made = type(name, bases, {"__module__": module, "__doc__": bases[-1].__doc__, **members})
    setattr(sys.modules[module], name, made)  # where pickle looks for it, and whoever reads `loaded_by`
    return made
