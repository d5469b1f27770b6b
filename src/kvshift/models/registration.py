"""Registration of model types with shift where transformers and its neighbours look models up.

A model is found through transformers' Auto classes, but some code reads tables of names instead: by the model type of
its configuration, or by the name of its class. Whatever is not in such a table is treated in another way, without an
error: `Trainer` with label smoothing, for example, compares the logits of an unlisted class with the same tokens
instead of the next. `register_model_type` enters a model type in all of them, beside the type of the stock model:

- transformers: the Auto classes; the names of classes by model type (label smoothing, pipelines, model cards, also read
  by lm-eval and by `transformers serve`); the tokenizers by model type, which override those that a folder names;
- PEFT: the default target modules of each method;
- accelerate: the parsers of Megatron-LM, which match parts of names and would build a stock model. Ours is refused.

PEFT and accelerate are not imported: their tables are filled once they are. PEFT's adaption prompt, which computes
attention by itself, has no entry: PEFT refuses the model type by name.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto, tokenization_auto

_AUTO: dict[str, tuple[Any, dict[str, Any]]] = {
    "ForSequenceClassification": (
        AutoModelForSequenceClassification,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "LMHeadModel": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "ForCausalLM": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "Model": (AutoModel, modeling_auto.MODEL_MAPPING_NAMES),
}
"""Auto classes and their tables of names, by the ending of a model class's name."""


def auto_class(model: type[PreTrainedModel]) -> Any:
    """Return the Auto class of transformers that corresponds to a model class."""
    return _entry(model)[0]


def _entry(model: type[PreTrainedModel]) -> tuple[Any, dict[str, Any]]:
    for ending, entry in _AUTO.items():
        if model.__name__.endswith(ending):
            return entry
    raise ValueError(f"the name of a model class must end with {' or '.join(_AUTO)}, got {model.__name__}")


def register_model_type(
    config: type[PreTrainedConfig],
    models: Iterable[type[PreTrainedModel]],
    *,
    like: str,
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Enter a model type in the tables that the module's docstring names.

    Args:
        config: configuration class of the model type.
        models: the decoder and the models with a head.
        like: model type of transformers whose entries apply, because its modules have the same names.
        renamed: names of modules that differ, by the name in `like`: in a model with one matrix for queries, keys and
            values. It gets only entries that other models with such a matrix have too. Its tokenizer is not that of
            `like`.
    """
    name = config.model_type
    AutoConfig.register(name, config, exist_ok=True)
    for model in models:
        auto, names = _entry(model)
        auto.register(config, model, exist_ok=True)
        names[name] = model.__name__
    if renamed is None:
        tokenizers = tokenization_auto.TOKENIZER_MAPPING_NAMES
        if like in tokenizers:
            tokenizers[name] = tokenizers[like]
        if like in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
            tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.add(name)
    when_imported("peft.utils.constants", lambda module: _enter_target_modules(module, name, like, renamed or {}))
    when_imported("accelerate.utils.dataclasses", lambda module: _refuse_megatron(module, name))


def _enter_target_modules(constants: ModuleType, name: str, like: str, renamed: Mapping[str, str]) -> None:
    """Enter a model type in every table of default modules in PEFT."""
    for title, table in vars(constants).items():
        if not (title.startswith("TRANSFORMERS_MODELS_TO_") and title.endswith("_MODULES_MAPPING") and like in table):
            continue
        modules = table[like]
        if set(modules) & set(renamed):
            if "gpt_neox" not in table:  # it has one matrix, too: here, PEFT cannot adapt a part of it
                continue
            modules = list(dict.fromkeys(renamed.get(module, module) for module in modules))
        table.setdefault(name, modules)


def _refuse_megatron(dataclasses: ModuleType, name: str) -> None:
    """Refuse a model type in accelerate's table of parsers, before the shorter name of the stock model matches."""

    def refuse(*_: Any) -> NoReturn:
        raise ValueError(
            f"Megatron-LM, which accelerate would use, builds a model of its own without the shift of {name!r}: use "
            "FSDP or DeepSpeed ZeRO, or torchtitan (kvshift.integrations.titan)"
        )

    parsers = dataclasses.MODEL_CONFIGS_TO_MEGATRON_PARSERS
    entries = {name: refuse, **parsers}
    parsers.clear()
    parsers.update(entries)


def when_imported(name: str, fill: Callable[[ModuleType], None]) -> None:
    """Call `fill` with a module once it is imported: now, or whenever an import has run it."""
    if name in sys.modules:
        fill(sys.modules[name])
    if _AFTER_IMPORT not in sys.meta_path:
        sys.meta_path.insert(0, _AFTER_IMPORT)
    _AFTER_IMPORT.fills.setdefault(name, []).append(fill)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and calls functions after a module has been run.

    Attributes:
        fills: these functions, by the name of the module.
    """

    def __init__(self) -> None:
        self.fills: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.fills:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_fill(module: ModuleType) -> None:
                run(module)
                for fill in self.fills[fullname]:
                    fill(module)

            loader.exec_module = run_and_fill
        return spec


_AFTER_IMPORT = _AfterImport()
