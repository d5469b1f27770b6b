"""Selective attention: each token says what the tokens after it need not look at; see `selective_attention`.

It stands after the projections, QK-norm and rotary embedding, and adds no parameter. Attention takes blocks of queries,
so that its memory grows with the context and not with its square; with attn_implementation="eager", which returns the
weights, and with dropout of the weights in training, it is computed whole.

Shapes: B batch, T positions, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from torch import Tensor

from kvshift.lab.variants.attending import AttendingGPT2, AttendingLlama, require_token_mask
from kvshift.lab.variants.selective_attention import selective_attention, selective_attention_whole
from kvshift.lab.variants.small_gpt2 import LabGPT2, LabGPT2Config
from kvshift.lab.variants.uncached import (
    UncachedConfig,
    UncachedGeneration,
    UncachedGPT2Model,
    UncachedLlamaModel,
    become,
)
from kvshift.lab.variants.variant import ModelVariant
from kvshift.models.documents import document_index, document_offsets, padding_mask
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM


class _SelectiveDecoder:
    """Stands before the decoder of a family, and makes none of its masks of T x T."""

    def prepare_inputs(
        self, inputs_embeds: Tensor, attention_mask: Any, position_ids: Tensor | None, cache: Any, **named: Any
    ) -> Any:
        require_token_mask(attention_mask, "selective attention")
        batch, positions = inputs_embeds.shape[:2]
        real = padding_mask(attention_mask, positions)
        documents = document_index(batch, positions, real, position_ids=position_ids, **named)
        offsets = None if documents is None else document_offsets(documents, 0, None)
        masks = {"attention": None, "padding": real, "documents": documents, "offsets": offsets}
        return super().prepare_inputs(inputs_embeds, masks, position_ids, cache, **named)  # type: ignore[misc]


class _SelectiveLlamaModel(_SelectiveDecoder, UncachedLlamaModel):
    pass


class _SelectiveGPT2Model(_SelectiveDecoder, UncachedGPT2Model):
    pass


class _SelectiveAttention:
    config: Any
    scaling: float
    training: bool
    attention_dropout: float

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        shift_mask: Tensor | None,
        shift_seq_idx: Tensor | None,
        **where: Any,
    ) -> tuple[Tensor, Tensor | None]:
        how: dict[str, Any] = {"scaling": self.scaling, "axis": self.config.axis}
        how |= {"mask": shift_mask, "seq_idx": shift_seq_idx}
        dropout = self.attention_dropout if self.training else 0.0
        if dropout or self.config._attn_implementation == "eager":
            output, weights = selective_attention_whole(query, key, value, dropout=dropout, **how)
        else:
            output, weights = selective_attention(query, key, value, **how), None
        return output.transpose(1, 2), weights


class _SelectiveLlamaAttention(_SelectiveAttention, AttendingLlama):
    pass


class _SelectiveGPT2Attention(_SelectiveAttention, AttendingGPT2):
    pass


@strict
class SelectiveLlamaConfig(UncachedConfig, KVShiftLlamaConfig):
    """What `SelectiveLlamaForCausalLM` is built from.

    Besides the fields of `KVShiftLlamaConfig`, of which `sliding_window` must be None:

    Args:
        axis: of the sum: "query", as published, or "key".
    """

    model_type = "kvshift_selective_llama"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.selective.SelectiveLlamaForCausalLM"

    axis: Literal["query", "key"] = "query"


class SelectiveLlamaForCausalLM(UncachedGeneration, KVShiftLlamaForCausalLM):
    """`KVShiftLlamaForCausalLM` with selective attention."""

    config: SelectiveLlamaConfig
    config_class = SelectiveLlamaConfig

    def __init__(self, config: SelectiveLlamaConfig) -> None:
        if config.sliding_window is not None:
            raise ValueError(f"sliding_window must be None for selective attention, got {config.sliding_window}")
        super().__init__(config)
        become(self.model, _SelectiveLlamaModel)
        for layer in self.model.layers:
            attention: Any = layer.self_attn
            become(attention, _SelectiveLlamaAttention)


@strict
class SelectiveGPT2Config(UncachedConfig, LabGPT2Config):
    """The fields of `LabGPT2Config`, and `axis` as in `SelectiveLlamaConfig`."""

    model_type = "kvshift_selective_lab_gpt2"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.selective.SelectiveGPT2"

    axis: Literal["query", "key"] = "query"


class SelectiveGPT2(LabGPT2):
    """`LabGPT2` with selective attention."""

    config: SelectiveGPT2Config
    config_class = SelectiveGPT2Config

    def __init__(self, config: SelectiveGPT2Config) -> None:
        super().__init__(config)
        become(self.transformer, _SelectiveGPT2Model)
        for block in self.transformer.h:
            become(block.attn, _SelectiveGPT2Attention)


_MODELS = {KVShiftLlamaConfig: SelectiveLlamaForCausalLM, LabGPT2Config: SelectiveGPT2}

MODEL_VARIANTS = (
    ModelVariant(name="selective", models=_MODELS),
    # Summed along the keys: as in the code that the KV-shift paper names for its Table 13.
    ModelVariant(name="selective-key", models=_MODELS, fields={"axis": "key"}),
)
