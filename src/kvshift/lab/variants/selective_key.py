"""Selective attention summed along the keys: as in the code that the KV-shift paper names for its Table 13."""

from __future__ import annotations

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from kvshift.lab.variants.selective import (
    SelectiveGPT2,
    SelectiveGPT2Config,
    SelectiveLlamaConfig,
    SelectiveLlamaForCausalLM,
)
from kvshift.lab.variants.small_gpt2 import LabGPT2Config
from kvshift.lab.variants.variant import ModelVariant
from kvshift.models.llama import KVShiftLlamaConfig

__all__ = ["VARIANT", "SelectiveKeyGPT2", "SelectiveKeyLlamaForCausalLM"]


@strict
class SelectiveKeyLlamaConfig(SelectiveLlamaConfig):
    """The fields of `SelectiveLlamaConfig`."""

    model_type = "kvshift_selective_key_llama"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.selective_key.SelectiveKeyLlamaForCausalLM"

    axis: Literal["query", "key"] = "key"


class SelectiveKeyLlamaForCausalLM(SelectiveLlamaForCausalLM):
    """`SelectiveLlamaForCausalLM` with the other sum."""

    config: SelectiveKeyLlamaConfig
    config_class = SelectiveKeyLlamaConfig


@strict
class SelectiveKeyGPT2Config(SelectiveGPT2Config):
    """The fields of `SelectiveGPT2Config`."""

    model_type = "kvshift_selective_key_lab_gpt2"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.selective_key.SelectiveKeyGPT2"

    axis: Literal["query", "key"] = "key"


class SelectiveKeyGPT2(SelectiveGPT2):
    """`SelectiveGPT2` with the other sum."""

    config: SelectiveKeyGPT2Config
    config_class = SelectiveKeyGPT2Config


VARIANT = ModelVariant(
    name="selective-key",
    models={KVShiftLlamaConfig: SelectiveKeyLlamaForCausalLM, LabGPT2Config: SelectiveKeyGPT2},
)
