"""Llama with KV shift. Importing this registers model type "kvshift_llama" with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from kvshift.models.cache import ensure_shift_cache
from kvshift.models.llama.configuration import SIZES, KVShiftLlamaConfig, size_config
from kvshift.models.llama.modeling import (
    KVShiftLlamaForCausalLM,
    KVShiftLlamaForSequenceClassification,
    KVShiftLlamaModel,
    KVShiftLlamaPreTrainedModel,
)

AutoConfig.register(KVShiftLlamaConfig.model_type, KVShiftLlamaConfig, exist_ok=True)
AutoModel.register(KVShiftLlamaConfig, KVShiftLlamaModel, exist_ok=True)
AutoModelForCausalLM.register(KVShiftLlamaConfig, KVShiftLlamaForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(KVShiftLlamaConfig, KVShiftLlamaForSequenceClassification, exist_ok=True)

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
