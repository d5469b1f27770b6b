"""What overrides a method of transformers takes the same arguments: the same names, order and defaults."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.core_model_loading import ConversionOps
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import kvshift.models
from kvshift.models.retrofit import FAMILIES
from kvshift.models.versions import CACHE

from .llama.tiny import random_tokens
from .registry import RETROFITTED

for _found in pkgutil.walk_packages(kvshift.models.__path__, "kvshift.models."):
    importlib.import_module(_found.name)

ATTENTION = tuple(family.attention[0] for family in FAMILIES)  # layers give it all but the first argument by name
ROOTS = [PreTrainedModel, PreTrainedConfig, CacheLayerMixin, ConversionOps, LlamaDecoderLayer, *ATTENTION]


def own_classes(root: type) -> Iterator[type]:
    for kind in root.__subclasses__():
        if kind.__module__.startswith("kvshift.models"):
            yield kind
        yield from own_classes(kind)


def overridden(kind: type) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, our function and transformers' for each method of transformers that a class of ours replaces."""
    for name in dir(kind):
        definitions = [(owner, vars(owner)[name]) for owner in kind.__mro__ if name in vars(owner)]
        own = definitions[0]
        theirs = next((found for owner, found in definitions if owner.__module__.startswith("transformers")), None)
        if own[0].__module__.startswith("kvshift") and theirs is not None:
            raw = getattr(own[1], "__func__", own[1])
            ours, theirs = (inspect.unwrap(getattr(found, "__func__", found)) for found in (own[1], theirs))
            if getattr(ours, "__module__", "kvshift").startswith("transformers"):  # it passes on whatever it gets
                ours = raw
            made_here = name == "__init__" and issubclass(kind, CacheLayerMixin)  # only `with_shift` makes them
            if inspect.isfunction(ours) and inspect.isfunction(theirs) and not made_here:
                yield name, ours, theirs


SAME = {"past_key_values": "cache"}  # two names of one argument
CLASSES = {kind.__qualname__: kind for root in ROOTS for kind in own_classes(root)}


@pytest.mark.parametrize("name", CLASSES)
def test_methods_of_transformers_keep_their_arguments(name):
    for method, ours, theirs in overridden(CLASSES[name]):
        signature = inspect.signature(ours, follow_wrapped=False)
        where = f"{name}.{method}{signature} replaces {inspect.signature(theirs)}"
        own = signature.parameters
        kinds = {parameter.kind for parameter in own.values()}
        takes_any, takes_more = inspect.Parameter.VAR_KEYWORD in kinds, inspect.Parameter.VAR_POSITIONAL in kinds
        places = [p.name for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        known = inspect.signature(theirs).parameters
        for place, parameter in enumerate(known.values()):
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            assert parameter.name in own or takes_any, where
            if parameter.name in own:
                assert own[parameter.name].default in (parameter.default, None), where
            by_place = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and not issubclass(CLASSES[name], ATTENTION)
            if by_place and not takes_more:
                assert place < len(places), where
                assert SAME.get(places[place], places[place]) == SAME.get(parameter.name, parameter.name), where
        for parameter in own.values():
            optional = parameter.default is not parameter.empty or parameter.kind in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            assert parameter.name in known or optional, where


@pytest.mark.parametrize("name", RETROFITTED)
def test_decoders_take_arguments_by_their_place(name):
    decoder = RETROFITTED[name]().base_model
    plain = next(plain for plain, own in decoder.family.models.items() if own is type(decoder))
    order = [parameter for parameter in inspect.signature(plain.forward).parameters if parameter != "self"]
    given = {"attention_mask": torch.ones(1, 7, dtype=torch.long), "position_ids": torch.arange(7).unsqueeze(0)}
    given["inputs_embeds"] = decoder.get_input_embeddings()(random_tokens(1, 7))
    places = [given.get(parameter) for parameter in order[: order.index("inputs_embeds") + 1]]
    with torch.no_grad():
        found, expected = decoder(*places), decoder(**given)
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=0, atol=0)


def test_the_classes_are_found():
    assert {"BaichuanM1ForCausalLM", "KVShiftGPT2Attention", "ShiftDynamicLayer", "KVShiftQwen3Config"} <= set(CLASSES)
    assert "from_pretrained" in {name for name, _, _ in overridden(CLASSES["BaichuanM1ForCausalLM"])}
    assert CACHE in inspect.signature(CLASSES["KVShiftLlamaModel"].forward).parameters
