"""GPT-2 with KV shift: what differs from transformers' GPT-2, and nothing else.

Positions are learned and added to the embeddings; there is no rotary embedding. One matrix, `c_attn`, makes queries,
keys and values; every query head has a KV head of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, GPT2Model
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, eager_attention_forward
from transformers.utils.generic import merge_with_config_defaults

from kvshift.layers import KVShift
from kvshift.models.cache import require_growth, token_count
from kvshift.models.decoder import ShiftedDecoder, shift_into
from kvshift.models.generation import ShiftedGeneration
from kvshift.models.retrofit.family import Family, RetrofitConfig, Retrofitted
from kvshift.models.versions import CACHE, given_cache, refuse_unknown


@strict
class KVShiftGPT2Config(RetrofitConfig, GPT2Config):
    """What `KVShiftGPT2LMHeadModel` is built from.

    Besides the fields of `transformers.GPT2Config`:

    Args:
        shift_targets: which of "q", "k", "v" each layer shifts; () is GPT-2 itself.
        shift_window: tokens mixed, the current one included; 2 in the paper.
        shift_constraint: "free", "gate" or "clamp"; see `kvshift.KVShift`.
        shift_init: "uniform" (the paper's, for training from scratch) or "identity" (a pretrained model computes what
            it did before).
    """

    model_type = "kvshift_gpt2"

    shift_targets: list[str] | tuple[str, ...] = ("k", "v")
    shift_window: int = 2
    shift_constraint: str = "free"
    shift_init: str = "uniform"
    use_cache: bool | dict[str, bool] = True


class KVShiftGPT2Attention(GPT2Attention):
    """GPT-2's self-attention over shifted keys and values."""

    shift: KVShift

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        shift_mask: Tensor | None = None,
        shift_seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch, positions = hidden_states.shape[:2]
        projected = self.c_attn(hidden_states).split(self.split_size, dim=2)
        query, key, value = (x.view(batch, positions, -1, self.head_dim) for x in projected)  # the operator's layout
        query, key, value, keep_raw = shift_into(
            self.shift,
            query,
            key,
            value,
            past_key_values if cache is None else cache,
            self.layer_idx,
            mask=shift_mask,
            seq_idx=shift_seq_idx,
        )
        implementation = self.config._attn_implementation
        with keep_raw:
            if implementation == "eager" and self.reorder_and_upcast_attn:
                output, weights = self._upcast_and_reordered_attn(query, key, value, attention_mask)
            else:
                attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
                output, weights = attention(
                    self,
                    query,
                    key,
                    value,
                    attention_mask,
                    dropout=self.attn_dropout.p if self.training else 0.0,
                    scaling=self.scaling,
                    **kwargs,
                )
        return self.resid_dropout(self.c_proj(output.reshape(batch, positions, -1).contiguous())), weights


class KVShiftGPT2Model(ShiftedDecoder, Retrofitted, GPT2Model):
    """The decoder without a head; see `transformers.GPT2Model`."""

    config: KVShiftGPT2Config
    config_class = KVShiftGPT2Config

    @merge_with_config_defaults
    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """As `transformers.GPT2Model.forward`, and documents packed into one row do not see each other.

        Neither shift nor attention crosses a boundary, with a cache or without. The first document of a call
        continues the last one in the cache.

        Args:
            seq_idx: (B, T) number of the document at each position; one begins where it changes.
            cu_seq_lens_q: (S + 1,) boundaries of the documents in the one row of a pack.
            position_ids: (B, T); where neither of the above is given, a document begins wherever they do not increase
                by one. Where they are not given, they count from the start of each document. As in GPT-2 they are
                needed beside padding on the left: the mask does not move the positions.
            past_key_values, cache: two names of one argument; the second is that of transformers 5.24 and later.

        Raises:
            TypeError: a keyword argument is unknown.
            RuntimeError: the layers did not put their tokens into the cache.
        """
        refuse_unknown(self, kwargs)
        if encoder_hidden_states is not None or encoder_attention_mask is not None:
            raise ValueError("encoder_hidden_states must be None: GPT-2 with KV shift has no cross-attention")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            if not isinstance(attention_mask, dict):
                self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            inputs_embeds = self.wte(input_ids)
        cache = given_cache(past_key_values, cache)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        masks, position_ids = self.prepare_inputs(
            inputs_embeds, attention_mask, position_ids, cache, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens_q
        )
        before = token_count(cache)
        if cu_seq_lens_q is not None:
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q
        mask = masks["attention"]
        if mask is None and cache is None:
            # GPT2Model makes a mask of its own: with none given, by documents that it reads from position_ids.
            mask = inputs_embeds.new_ones(inputs_embeds.shape[:2], dtype=torch.bool)
        output = super().forward(
            attention_mask=mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            shift_mask=masks["padding"],
            shift_seq_idx=masks["documents"],
            **{CACHE: cache},
            **kwargs,
        )
        require_growth(self, cache, before, inputs_embeds.shape[1])
        return output


class KVShiftGPT2LMHeadModel(ShiftedGeneration, Retrofitted, GPT2LMHeadModel):
    """GPT-2 with KV shift and a language-modelling head; see `transformers.GPT2LMHeadModel`."""

    config: KVShiftGPT2Config
    config_class = KVShiftGPT2Config


class KVShiftGPT2ForSequenceClassification(Retrofitted, GPT2ForSequenceClassification):
    """GPT-2 with KV shift and a head that classifies; see `transformers.GPT2ForSequenceClassification`."""

    config: KVShiftGPT2Config
    config_class = KVShiftGPT2Config


def _refuse(config: GPT2Config) -> None:
    if config.add_cross_attention:
        raise ValueError(
            "add_cross_attention is True in the configuration: the shift has no meaning for the keys and values of "
            "its crossattention layers, which come from an encoder"
        )


GPT2 = Family(
    config=KVShiftGPT2Config,
    attention=(GPT2Attention, KVShiftGPT2Attention),
    models={
        GPT2Model: KVShiftGPT2Model,
        GPT2LMHeadModel: KVShiftGPT2LMHeadModel,
        GPT2ForSequenceClassification: KVShiftGPT2ForSequenceClassification,
    },
    heads=lambda config: (config.num_attention_heads, config.num_attention_heads),
    refuse=_refuse,
)
