"""MLA with the hard shift of a key and a value: nothing is learned; see `mla`."""

from kvshift.lab.variants.mla import MLALlamaForCausalLM
from kvshift.lab.variants.variant import ModelVariant
from kvshift.models.llama import KVShiftLlamaConfig

__all__ = ["VARIANT"]

VARIANT = ModelVariant(
    name="mla-kv-shift", models={KVShiftLlamaConfig: MLALlamaForCausalLM}, fields={"hard_shift": True}
)
