"""The Differential Transformer with KV shift: alpha mixes both keys of a KV head, beta its value."""

from kvshift.lab.variants.differential import DifferentialLlamaForCausalLM
from kvshift.lab.variants.variant import ModelVariant
from kvshift.models.llama import KVShiftLlamaConfig

__all__ = ["VARIANT"]

VARIANT = ModelVariant(
    name="differential-kv-shift",
    models={KVShiftLlamaConfig: DifferentialLlamaForCausalLM},
    fields={"shift_targets": ["k", "v"]},
)
