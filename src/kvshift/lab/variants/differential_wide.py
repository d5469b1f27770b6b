"""The Differential Transformer with half as many heads as vanilla, each twice as large: the paper's own choice."""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from kvshift.lab.variants.differential import DifferentialLlamaConfig, DifferentialLlamaForCausalLM
from kvshift.lab.variants.variant import ModelVariant
from kvshift.models.llama import KVShiftLlamaConfig

__all__ = ["VARIANT", "DifferentialWideLlamaConfig", "DifferentialWideLlamaForCausalLM"]


@strict
class DifferentialWideLlamaConfig(DifferentialLlamaConfig):
    """The fields of `DifferentialLlamaConfig`."""

    model_type = "kvshift_differential_wide_llama"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.differential_wide.DifferentialWideLlamaForCausalLM"

    halve_heads: bool = True


class DifferentialWideLlamaForCausalLM(DifferentialLlamaForCausalLM):
    """`DifferentialLlamaForCausalLM` with half as many heads."""

    config: DifferentialWideLlamaConfig
    config_class = DifferentialWideLlamaConfig


VARIANT = ModelVariant(name="differential-wide", models={KVShiftLlamaConfig: DifferentialWideLlamaForCausalLM})
