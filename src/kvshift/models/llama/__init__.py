"""Llama with KV shift. Importing this registers model type "kvshift_llama" with transformers' Auto classes."""

from kvshift.models.cache import ensure_shift_cache
from kvshift.models.llama.configuration import SIZES, KVShiftLlamaConfig, size_config
from kvshift.models.llama.modeling import (
    KVShiftLlamaForCausalLM,
    KVShiftLlamaForSequenceClassification,
    KVShiftLlamaModel,
    KVShiftLlamaPreTrainedModel,
)
from kvshift.models.registration import register_model_type

register_model_type(
    KVShiftLlamaConfig,
    (KVShiftLlamaModel, KVShiftLlamaForCausalLM, KVShiftLlamaForSequenceClassification),
    like="llama",
)

__all__ = [
    "SIZES",
    "KVShiftLlamaConfig",
    "KVShiftLlamaForCausalLM",
    "KVShiftLlamaForSequenceClassification",
    "KVShiftLlamaModel",
    "KVShiftLlamaPreTrainedModel",
    "ensure_shift_cache",
    "size_config",
]
