"""Selective attention: each token selects keys that later tokens attend to less; see `selective_attention`.

It takes queries, keys and values after projections, QK-norm and rotary embedding, and adds no parameters. Attention is
computed in blocks of queries, so its memory grows linearly with the context, not quadratically. It is computed on whole
matrices with attn_implementation="eager", which returns the weights, and with dropout of the weights in training.

Shapes: B batch, T positions, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from kvshift.models.extending import ShiftedAttention, create_token_masks
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.variants.model_classes import prepend_class, variant_class
from kvshift_lab.variants.selective_attention import selective_attention, selective_attention_full
from kvshift_lab.variants.small_gpt2 import LabGPT2, LabGPT2Config
from kvshift_lab.variants.token_mixing import require_token_mask
from kvshift_lab.variants.uncached import UncachedConfig, UncachedDecoder, UncachedGeneration
from kvshift_lab.variants.variant import ModelVariant


class _SelectiveDecoder(UncachedDecoder):
    """A mixin for a decoder that creates none of the family's T x T masks."""

    def prepare_inputs(
        self, inputs_embeds: Tensor, attention_mask: Any, position_ids: Tensor | None, cache: Any, **named: Any
    ) -> Any:
        require_token_mask(attention_mask, "selective attention")
        masks = create_token_masks(inputs_embeds, attention_mask, position_ids, **named)
        return super().prepare_inputs(inputs_embeds, masks, position_ids, cache, **named)  # type: ignore[misc]


class _SelectiveAttention(ShiftedAttention):
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        shift_mask: Tensor | None,
        shift_seq_idx: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        arguments: dict[str, Any] = {"scaling": self.scaling, "axis": self.config.axis}
        arguments |= {"mask": shift_mask, "seq_idx": shift_seq_idx}
        dropout = self.attention_dropout if self.training else 0.0
        if dropout or self.config._attn_implementation == "eager":
            output, weights = selective_attention_full(query, key, value, dropout=dropout, **arguments)
        else:
            output, weights = selective_attention(query, key, value, **arguments), None
        return output.transpose(1, 2), weights


def _select(model: Any) -> None:
    if getattr(model.config, "sliding_window", None) is not None:
        raise ValueError(f"sliding_window must be None for selective attention, got {model.config.sliding_window}")
    prepend_class(model.base_model, _SelectiveDecoder)
    for module in list(model.modules()):
        if isinstance(module, ShiftedAttention):
            prepend_class(module, _SelectiveAttention)


# The configurations have a field `axis`, along which S is summed: "query", as published, or "key".
_CLASS_OPTIONS: Any = {"config_before": UncachedConfig, "fields": {"axis": (Literal["query", "key"], "query")}}
_MODELS = {
    KVShiftLlamaConfig: variant_class(
        KVShiftLlamaForCausalLM, "Selective", _select, before=(UncachedGeneration,), **_CLASS_OPTIONS
    ),
    LabGPT2Config: variant_class(LabGPT2, "Selective", _select, **_CLASS_OPTIONS),
}

MODEL_VARIANTS = (
    ModelVariant(name="selective", models=_MODELS),
    # The sum along the keys is that of the code that the KV-shift paper cites for its Table 13.
    ModelVariant(name="selective-key", models=_MODELS, fields={"axis": "key"}),
)
