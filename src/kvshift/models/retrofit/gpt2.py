"""GPT-2 with KV shift: only the differences from transformers' GPT-2.

Positions are learned and added to the embeddings; there is no rotary embedding. One matrix, `c_attn`, projects to
queries, keys and values; there are as many KV heads as query heads.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, GPT2Model
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, eager_attention_forward

from kvshift.models.decoder import ShiftedAttention, ShiftedDecoder
from kvshift.models.generation import ShiftedGeneration
from kvshift.models.retrofit.family import Family, RetrofitConfig, Retrofitted
from kvshift.models.versions import CACHE


@strict
class KVShiftGPT2Config(RetrofitConfig, GPT2Config):
    """Configuration of GPT-2 with KV shift: the fields of `transformers.GPT2Config` and of `ShiftConfig`."""

    model_type = "kvshift_gpt2"


class KVShiftGPT2Attention(ShiftedAttention, GPT2Attention):
    """GPT-2's self-attention over shifted keys and values."""

    attention_dropout = property(lambda self: self.attn_dropout.p)  # type: ignore[assignment]

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._split_heads(*self.c_attn(hidden_states).split(self.split_size, dim=2))

    def output(self, heads: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(heads.reshape(*heads.shape[:2], -1).contiguous()))

    @staticmethod
    def eager_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        if module.reorder_and_upcast_attn:
            return module._upcast_and_reordered_attn(query, key, value, mask)
        return eager_attention_forward(module, query, key, value, mask, **kwargs)


class KVShiftGPT2Model(ShiftedDecoder, Retrofitted, GPT2Model):
    """The decoder without a head; see `transformers.GPT2Model`."""

    config: KVShiftGPT2Config
    config_class = KVShiftGPT2Config
    own_arguments = frozenset({"token_type_ids"})
    embed_tokens = property(lambda self: self.wte)  # type: ignore[assignment]

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
        """Run the decoder as `transformers.GPT2Model` does, and keep documents that are packed into one row apart.

        As in GPT-2, left-padded inputs need position_ids, because positions do not depend on the mask.
        """
        if encoder_hidden_states is not None or encoder_attention_mask is not None:
            raise ValueError("encoder_hidden_states must be None: GPT-2 with KV shift has no cross-attention")
        if input_ids is not None and not isinstance(attention_mask, dict):
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        arguments = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        return super().forward(*arguments, seq_idx, cu_seq_lens_q, cache, token_type_ids=token_type_ids, **kwargs)

    def run_layers(self, hidden_states: Tensor, masks: dict[str, Tensor | None], **kwargs: Any) -> Any:
        mask = masks["attention"]
        if mask is None and kwargs[CACHE] is None:
            # If none is given, GPT2Model makes a mask of its own, with documents that it reads from position_ids.
            mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        return GPT2Model.forward(self, inputs_embeds=hidden_states, attention_mask=mask, **kwargs)


class KVShiftGPT2LMHeadModel(ShiftedGeneration, Retrofitted, GPT2LMHeadModel):
    """GPT-2 with KV shift and a language-modelling head; see `transformers.GPT2LMHeadModel`."""

    config: KVShiftGPT2Config
    config_class = KVShiftGPT2Config
    # Transformers reads it from the name of the class, in which it finds none: `Trainer` would then divide a sum over
    # T - 1 labels of each row by T.
    loss_type = property(lambda self: "ForCausalLM", lambda self, value: None)  # type: ignore[assignment]


class KVShiftGPT2ForSequenceClassification(Retrofitted, GPT2ForSequenceClassification):
    """GPT-2 with KV shift and a sequence classification head; see `transformers.GPT2ForSequenceClassification`."""

    config: KVShiftGPT2Config
    config_class = KVShiftGPT2Config


def _refuse(config: GPT2Config) -> None:
    if config.add_cross_attention:
        raise ValueError(
            "add_cross_attention must be False in the configuration: the shift has no meaning for the keys and values "
            "of crossattention layers, which come from an encoder"
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
    bias=True,
    output_bias=True,
    refuse=_refuse,
)
