"""The base class of variants with another attention function over the finished queries, keys and values.

A variant implements `attend` in a subclass of `AttentionMixin` and prepends this class to the attention of each layer
(see `prepend_class`). Projections, shift, QK-norm, rotary embedding and cache remain those of the family.

Shapes: B batch, T positions of this call, K keys, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from kvshift.models.decoder import ShiftedAttention, shift_and_cache


def require_token_mask(attention_mask: Any, variant: str) -> None:
    """Raise a ValueError unless the mask is None or (batch, positions); the variant makes the pairwise mask itself."""
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2):
        what = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask must be (batch, positions) or None for {variant}, got {what}")


class AttentionMixin(ShiftedAttention):
    """A mixin for the attention of the Llamas and of the lab's GPT-2, which has no cache."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **where: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value, keep_raw = shift_and_cache(
            self.shift,
            *self.project(hidden_states),
            past_key_values if cache is None else cache,
            self.layer_idx,
            mask=where["shift_mask"],
            seq_idx=where["shift_seq_idx"],
            rotary=position_embeddings,
            norms=(self.q_norm, self.k_norm) if self.qk_norm else None,
        )
        with keep_raw:
            output, weights = self.attend(query, key, value, attention_mask=attention_mask, **where)
        return self.output(output), weights

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **where: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output of attention, (B, T, heads, size), and its weights or None.

        Args:
            query: (B, H, T, D).
            key, value: (B, G, K, D).
            where: attention_mask, shift_mask and shift_seq_idx from `create_masks`, and the layer's other arguments.
        """
        raise NotImplementedError

    def softmax_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, attention_mask: Tensor | None, **where: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention with the configured implementation; H must be G times `num_key_value_groups`."""
        implementation = where.pop("attn_implementation", None) or self.config._attn_implementation
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        for name in ("shift_mask", "shift_seq_idx"):
            where.pop(name, None)
        return attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **where,
        )
