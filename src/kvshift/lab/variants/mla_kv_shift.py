"""MLA with the hard shift of a key and a value: nothing is learned; see `mla`."""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from kvshift.lab.variants.mla import MLALlamaConfig, MLALlamaForCausalLM
from kvshift.lab.variants.variant import ModelVariant
from kvshift.models.llama import KVShiftLlamaConfig

__all__ = ["VARIANT", "MLAKVShiftLlamaConfig", "MLAKVShiftLlamaForCausalLM"]


@strict
class MLAKVShiftLlamaConfig(MLALlamaConfig):
    """The fields of `MLALlamaConfig`."""

    model_type = "kvshift_mla_kv_shift_llama"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.mla_kv_shift.MLAKVShiftLlamaForCausalLM"

    hard_shift: bool = True


class MLAKVShiftLlamaForCausalLM(MLALlamaForCausalLM):
    """`MLALlamaForCausalLM`, shifted."""

    config: MLAKVShiftLlamaConfig
    config_class = MLAKVShiftLlamaConfig


VARIANT = ModelVariant(name="mla-kv-shift", models={KVShiftLlamaConfig: MLAKVShiftLlamaForCausalLM})
