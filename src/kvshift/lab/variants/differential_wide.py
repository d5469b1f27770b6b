"""The Differential Transformer with half as many heads as vanilla, each twice as large: the paper's own choice."""

from kvshift.lab.variants.differential import DifferentialLlamaForCausalLM
from kvshift.lab.variants.variant import ModelVariant
from kvshift.models.llama import KVShiftLlamaConfig

__all__ = ["VARIANT"]

VARIANT = ModelVariant(
    name="differential-wide",
    models={KVShiftLlamaConfig: DifferentialLlamaForCausalLM},
    fields={"halve_heads": True},
)
