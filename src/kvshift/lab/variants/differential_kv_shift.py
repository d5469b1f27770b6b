"""The Differential Transformer with KV shift: alpha mixes both keys of a KV head, beta its value."""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from kvshift.lab.variants.differential import DifferentialLlamaConfig, DifferentialLlamaForCausalLM
from kvshift.lab.variants.variant import ModelVariant
from kvshift.models.llama import KVShiftLlamaConfig

__all__ = ["VARIANT", "DifferentialKVShiftLlamaConfig", "DifferentialKVShiftLlamaForCausalLM"]


@strict
class DifferentialKVShiftLlamaConfig(DifferentialLlamaConfig):
    """The fields of `DifferentialLlamaConfig`; the model makes of `shift_targets` that are () keys and values."""

    model_type = "kvshift_differential_kv_shift_llama"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.differential_kv_shift.DifferentialKVShiftLlamaForCausalLM"


class DifferentialKVShiftLlamaForCausalLM(DifferentialLlamaForCausalLM):
    """`DifferentialLlamaForCausalLM`, shifted."""

    config: DifferentialKVShiftLlamaConfig
    config_class = DifferentialKVShiftLlamaConfig

    def __init__(self, config: DifferentialKVShiftLlamaConfig) -> None:
        config.shift_targets = config.shift_targets or ["k", "v"]
        super().__init__(config)


VARIANT = ModelVariant(name="differential-kv-shift", models={KVShiftLlamaConfig: DifferentialKVShiftLlamaForCausalLM})
