"""Llama with KV shift: what differs from transformers' Llama, and nothing else.

Every layer shifts the projected keys and values before QK-norm and rotary embedding. The cache keeps the last raw
ones beside the shifted; padding and documents reach the shift through the arguments of the model (`shifted.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from kvshift.layers import KVShift
from kvshift.layers.positions import half_tables
from kvshift.layers.recompute import KEEP_ALL
from kvshift.models.cache import shift_into
from kvshift.models.llama.configuration import KVShiftLlamaConfig
from kvshift.models.shifted import ShiftedDecoder, ShiftedGeneration, ShiftedPreTrainedModel


class KVShiftLlamaAttention(LlamaAttention):
    """Llama's attention over shifted keys and values."""

    def __init__(self, config: KVShiftLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window = config.sliding_window
        self.qk_norm = config.qk_norm  # read at every token: an attribute of the module costs less than the config's
        self.shift = KVShift(
            config.num_key_value_heads,
            num_heads=config.num_attention_heads,
            targets=config.shift_targets,
            window=config.shift_window,
            constraint=config.shift_constraint,
            init=config.shift_init,
        )
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        shift_mask: Tensor | None = None,
        shift_seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch, positions = hidden_states.shape[:2]
        heads = (batch, positions, -1, self.head_dim)  # the layout of the operator
        query = self.q_proj(hidden_states).view(heads)
        key = self.k_proj(hidden_states).view(heads)
        value = self.v_proj(hidden_states).view(heads)

        finish = {"rotary": position_embeddings, "norms": (self.q_norm, self.k_norm) if self.qk_norm else None}
        raw = key, value
        query, key, value = shift_into(
            self.shift,
            query,
            key,
            value,
            past_key_values,
            self.layer_idx,
            mask=shift_mask,
            seq_idx=shift_seq_idx,
            **finish,
        )
        keep_raw = KEEP_ALL
        if past_key_values is None and torch.is_grad_enabled():
            keep_raw = self.shift.recomputing(raw, (key, value), mask=shift_mask, seq_idx=shift_seq_idx, **finish)

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        with keep_raw:
            output, weights = attention(
                self,
                query,
                key,
                value,
                attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                sliding_window=self.sliding_window,
                **kwargs,
            )
        return self.o_proj(output.reshape(batch, positions, -1).contiguous()), weights


class KVShiftLlamaDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around `KVShiftLlamaAttention`."""

    def __init__(self, config: KVShiftLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = KVShiftLlamaAttention(config, layer_idx)


class KVShiftLlamaPreTrainedModel(ShiftedPreTrainedModel, LlamaPreTrainedModel):
    """What the models of the family share; coefficients are initialised here and stay in float32."""

    config: KVShiftLlamaConfig
    config_class = KVShiftLlamaConfig
    _no_split_modules: ClassVar = ["KVShiftLlamaDecoderLayer"]
    _can_record_outputs: ClassVar = {"hidden_states": KVShiftLlamaDecoderLayer, "attentions": KVShiftLlamaAttention}


class KVShiftLlamaModel(ShiftedDecoder, KVShiftLlamaPreTrainedModel, LlamaModel):
    """The decoder without a head; see `transformers.LlamaModel`."""

    def __init__(self, config: KVShiftLlamaConfig) -> None:
        self._check_config(config)
        super(LlamaModel, self).__init__(config)  # not Llama's own: its layers would take memory and be thrown away
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(KVShiftLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        rotated, size = 2 * self.rotary_emb.inv_freq.shape[0], config.head_dim
        if rotated != size:
            raise ValueError(
                f"rope_parameters must rotate whole heads, as in Llama; {rotated} of {size} dimensions would be "
                f"rotated by {config.rope_parameters}"
            )
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """As `transformers.LlamaModel.forward`, and documents packed into one row do not see each other.

        Neither shift nor attention crosses a boundary, with a cache or without. The first document of a call goes on
        with the last one in the cache.

        Args:
            seq_idx: (B, T) number of the document at each position; one begins where it changes.
            cu_seq_lens_q: (S + 1,) boundaries of the documents in the one row of a pack.
            position_ids: (B, T); where neither of the above is given, a document begins wherever they do not go on
                by one. Where they are not given, they count from the start of each document.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        masks, position_ids = self.begin(
            inputs_embeds, attention_mask, position_ids, past_key_values, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens_q
        )
        if cu_seq_lens_q is not None:
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q

        hidden_states = inputs_embeds
        position_embeddings = half_tables(*self.rotary_emb(hidden_states, position_ids=position_ids))
        for decoder_layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=masks["attention"],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                shift_mask=masks["padding"],
                shift_seq_idx=masks["documents"],
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class KVShiftLlamaForCausalLM(ShiftedGeneration, KVShiftLlamaPreTrainedModel, LlamaForCausalLM):
    """Llama with KV shift and a language-modelling head; see `transformers.LlamaForCausalLM`."""

    def __init__(self, config: KVShiftLlamaConfig) -> None:
        self._check_config(config)
        super(LlamaForCausalLM, self).__init__(config)  # not Llama's own, as above
        self.model = KVShiftLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
