"""Derive the model classes of variants from the model classes of the families.

A variant is written once for all families: as mixins for the classes of a model's modules (`prepend_class`), and as a
function that changes a constructed model in place (`variant_class`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel

from kvshift.models.extending import register_model_class


class NamedConfig:
    """A mixin for the configuration of a family; other model classes refuse to load the files that it saves.

    In a saved configuration, `use_cache` is a dict, which other classes reject, and its key contains `loaded_by`.
    """

    loaded_by: ClassVar[str]
    use_cache: bool | dict[str, bool]

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration in the form in which transformers saves it."""
        saved = super().to_dict()  # type: ignore[misc]
        saved["use_cache"] = {f"kv_shift: load it with {self.loaded_by}": self.use_cache}
        return saved


def prepend_class(module: nn.Module, before: type) -> None:
    """Replace a module's class, in place, by a subclass of `before` and that class; weights, names and hooks stay."""
    module.__class__ = _combined(before, type(module))
    if isinstance(module, PreTrainedModel):
        register_model_class(module)


def variant_class(
    base: Any,
    stem: str,
    change: Callable[[Any], None],
    *,
    before: tuple[type, ...] = (),
    config_before: type = NamedConfig,
    fields: Mapping[str, tuple[Any, Any]] | None = None,
) -> Any:
    """Create the model class of a variant in one family, with a new configuration class as `config_class`.

        base KVShiftLlamaForCausalLM    SmearLlamaForCausalLM, SmearLlamaConfig, model type kvshift_smear_llama
        base LabGPT2                    SmearGPT2, SmearGPT2Config, model type kvshift_smear_lab_gpt2

    Args:
        base: the model class of the family.
        stem: prefix of the class names, such as "Smear".
        change: function that turns a model of the family into the variant; the new classes are added to its module.
        before, config_before: mixins for the family's model class and for its configuration class.
        fields: types and defaults of the configuration's fields beyond those of the family.
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
    setattr(sys.modules[module], name, made)  # pickle and readers of `loaded_by` look for it there
    return made
