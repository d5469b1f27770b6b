"""The families that can be given a shift; the rotary ones use the attention and the decoder of `models/decoder.py`.

Most are defined by a call of `rotary_family` with the names of their classes. Other differences, such as how queries,
keys and values are projected or where the attention window is stored, are in a mixin class above the call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from kvshift.models.decoder import ShiftedAttention
from kvshift.models.llama import (
    KVShiftLlamaConfig,
    KVShiftLlamaForCausalLM,
    KVShiftLlamaForSequenceClassification,
    KVShiftLlamaModel,
)
from kvshift.models.llama.modeling import KVShiftLlamaAttention, refuse_partial_rotary
from kvshift.models.retrofit.family import Family, RetrofittedDecoder, rotary_family
from kvshift.models.retrofit.gpt2 import GPT2

LLAMA = Family(
    config=KVShiftLlamaConfig,
    attention=(modeling_llama.LlamaAttention, KVShiftLlamaAttention),
    models={
        modeling_llama.LlamaModel: KVShiftLlamaModel,
        modeling_llama.LlamaForCausalLM: KVShiftLlamaForCausalLM,
        modeling_llama.LlamaForSequenceClassification: KVShiftLlamaForSequenceClassification,
    },
    refuse=refuse_partial_rotary,
)


class _OneWindow(ShiftedAttention):
    """Attention whose window is that of the configuration, in all layers."""

    sliding_window = property(lambda self: self.config.sliding_window)  # type: ignore[assignment]


MISTRAL = rotary_family(
    modeling_mistral,
    "MistralAttention",
    "MistralModel",
    "MistralForCausalLM",
    "MistralForSequenceClassification",
    llama_norm=modeling_mistral.MistralRMSNorm,
    attention=_OneWindow,
    bias=False,
    output_bias=False,
)
QWEN2 = rotary_family(
    modeling_qwen2,
    "Qwen2Attention",
    "Qwen2Model",
    "Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification",
    llama_norm=modeling_qwen2.Qwen2RMSNorm,
    bias=True,
    output_bias=False,
)
QWEN3 = rotary_family(
    modeling_qwen3,
    "Qwen3Attention",
    "Qwen3Model",
    "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification",
    llama_norm=modeling_qwen3.Qwen3RMSNorm,
    qk_norm=True,
)


class _Gemma3Decoder(RetrofittedDecoder):
    """Decoder with a different rotary base for sliding-window layers."""

    def rotary_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        types = sorted(set(self.config.layer_types))
        return {layer_type: self.rotary_emb(hidden_states, position_ids, layer_type) for layer_type in types}


def _refuse_bidirectional(config: Any) -> None:
    if config.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention must be False in the configuration: KV shift is causal")


GEMMA3 = rotary_family(
    modeling_gemma3,
    "Gemma3Attention",
    "Gemma3TextModel",
    "Gemma3ForCausalLM",
    "Gemma3TextForSequenceClassification",
    qk_norm=True,
    decoder=_Gemma3Decoder,
    refuse=_refuse_bidirectional,
)


class _GPTNeoXAttention(ShiftedAttention):
    """Attention with one matrix for queries, keys and values, head by head, and with other attribute names."""

    head_dim = property(lambda self: self.head_size)  # type: ignore[assignment]

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (*hidden_states.shape[:2], -1, 3 * self.head_dim)
        query, key, value = self.query_key_value(hidden_states).view(heads).chunk(3, dim=-1)
        return query, key, value

    def output(self, heads: Tensor) -> Tensor:
        return self.dense(heads.reshape(*heads.shape[:2], -1).contiguous())

    def forward(self, *args: Any, layer_past: None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(*args, **kwargs)


class _GPTNeoXDecoder(RetrofittedDecoder):
    norm = property(lambda self: self.final_layer_norm)  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the decoder as other families' do; the order of the arguments is that of GPT-NeoX."""
        arguments = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        return super().forward(*arguments, **kwargs)

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        return self.emb_dropout(self.embed_in(input_ids) if inputs_embeds is None else inputs_embeds)


GPT_NEOX = rotary_family(
    modeling_gpt_neox,
    "GPTNeoXAttention",
    "GPTNeoXModel",
    "GPTNeoXForCausalLM",
    "GPTNeoXForSequenceClassification",
    attention=_GPTNeoXAttention,
    decoder=_GPTNeoXDecoder,
    heads=lambda config: (config.num_attention_heads, config.num_attention_heads),
)


class _Phi3Attention(_OneWindow):
    """Attention with one matrix for all query heads, then all key heads, then all value heads."""

    qkv_proj: nn.Module

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        qkv = self.qkv_proj(hidden_states).view(*hidden_states.shape[:2], -1, self.head_dim)
        query, key, value = qkv.split(heads, dim=2)
        return query, key, value


PHI3 = rotary_family(
    modeling_phi3,
    "Phi3Attention",
    "Phi3Model",
    "Phi3ForCausalLM",
    "Phi3ForSequenceClassification",
    attention=_Phi3Attention,
    bias=False,
    output_bias=False,
)

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, GPT_NEOX, PHI3)
"""All families to whose models `add_kv_shift` can add the shift."""
