"""Llama with KV shift: only the differences from transformers' Llama. Shared code is in `models/decoder.py`."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
)

from kvshift.layers import KVShift, ShiftOptions
from kvshift.models.decoder import RotaryDecoder, ShiftedAttention, ShiftedPreTrainedModel
from kvshift.models.generation import ShiftedGeneration
from kvshift.models.llama.configuration import KVShiftLlamaConfig


class KVShiftLlamaAttention(ShiftedAttention, LlamaAttention):
    """Llama's attention over shifted keys and values."""

    eager_attention = staticmethod(eager_attention_forward)
    llama_norm = LlamaRMSNorm

    def __init__(self, config: KVShiftLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window = config.sliding_window
        self.qk_norm = config.qk_norm
        options = ShiftOptions.of(config)
        self.shift = KVShift(config.num_key_value_heads, options, num_heads=config.num_attention_heads)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)


class KVShiftLlamaDecoderLayer(LlamaDecoderLayer):
    """Llama's decoder layer with `KVShiftLlamaAttention`."""

    attention_class: ClassVar[type[nn.Module]] = KVShiftLlamaAttention
    forward = inspect.unwrap(LlamaDecoderLayer.forward)  # transformers wraps it again in every subclass

    def __init__(self, config: KVShiftLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn: Any = self.attention_class(config, layer_idx)


class KVShiftLlamaPreTrainedModel(ShiftedPreTrainedModel, LlamaPreTrainedModel):
    """Base class of the family's models: it initialises the coefficients and keeps them in float32."""

    config: KVShiftLlamaConfig
    config_class = KVShiftLlamaConfig
    _no_split_modules: ClassVar = ["KVShiftLlamaDecoderLayer", "LlamaDecoderLayer"]  # the second: add_kv_shift
    _can_record_outputs: ClassVar = {"hidden_states": LlamaDecoderLayer, "attentions": KVShiftLlamaAttention}
    # Modules that are arguments, whose hooks of their own load their weights.
    _skip_keys_device_placement: ClassVar = [*(LlamaPreTrainedModel._skip_keys_device_placement or ()), "norms"]


class KVShiftLlamaModel(RotaryDecoder, KVShiftLlamaPreTrainedModel, LlamaModel):
    """The decoder without a head; see `transformers.LlamaModel`."""

    layer_class: ClassVar[type[nn.Module]] = KVShiftLlamaDecoderLayer
    has_llama_layers = True

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        super(LlamaModel, self).__init__(config)  # skips LlamaModel.__init__, whose layers would be discarded
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = self.rotary_embedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def rotary_embedding(self, config: Any) -> nn.Module:
        refuse_partial_rotary(config)
        return LlamaRotaryEmbedding(config=config)


class KVShiftLlamaForCausalLM(ShiftedGeneration, KVShiftLlamaPreTrainedModel, LlamaForCausalLM):
    """Llama with KV shift and a language-modelling head; see `transformers.LlamaForCausalLM`."""

    def __init__(self, config: KVShiftLlamaConfig) -> None:
        self._check_config(config)
        super(LlamaForCausalLM, self).__init__(config)  # skips LlamaForCausalLM.__init__, as above
        self.model = KVShiftLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class KVShiftLlamaForSequenceClassification(KVShiftLlamaPreTrainedModel, LlamaForSequenceClassification):
    """Llama with KV shift and a sequence classification head; see `transformers.LlamaForSequenceClassification`."""


def refuse_partial_rotary(config: Any) -> None:
    """Raise a ValueError if `rope_parameters` do not rotate whole heads."""
    rotated, size = 2 * LlamaRotaryEmbedding(config=config).inv_freq.shape[0], config.head_dim
    if rotated != size:
        raise ValueError(
            f"rope_parameters must rotate whole heads, as in Llama; {rotated} of {size} dimensions would be "
            f"rotated by {config.rope_parameters}"
        )
