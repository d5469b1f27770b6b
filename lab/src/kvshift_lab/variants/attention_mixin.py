"""The base classes of variants that replace one part of an attention: the shift, or the attention function.

All other parts remain those of the family.

Shapes: B batch, T positions of this call, K keys, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from kvshift.models.decoder import ShiftedAttention, shift_and_cache
from kvshift.ops import ShiftState
from kvshift.ops.arguments import Norms
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.rope import Rotary


def require_token_mask(attention_mask: Any, variant: str) -> None:
    """Raise a ValueError unless the mask is None or (batch, positions); the variant makes the pairwise mask itself."""
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2):
        what = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask must be (batch, positions) or None for {variant}, got {what}")


class TokenMixing(nn.Module):
    """A module that replaces the `KVShift` of an attention and is called like it. Subclasses implement `mix`.

    Like the shift, it takes raw keys and values, after the projections and before QK-norm and rotary embedding. The
    cache stores its raw rows beside the finished keys and values, and moves, crops and resets them together
    (`kvshift.models.cache`).

    Attributes:
        targets: which of "k" and "v" it changes.
        after_norm: whether it is applied between QK-norm and rotary embedding instead of before both.
    """

    targets: tuple[str, ...] = ("k", "v")
    after_norm: bool = False

    def mix(
        self, k: Tensor, v: Tensor, state: ShiftState | None, *, mask: Tensor | None, seq_idx: Tensor | None
    ) -> tuple[Tensor, Tensor, ShiftState | None]:
        """Return mixed keys and values (B, T, G, D) and the new state; arguments are those of `kvshift.kv_shift`."""
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: ShiftState | None = None,
        mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        rotary: Rotary | None = None,
        norms: Norms | None = None,
        keep_state: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, ShiftState | None]:
        """Apply `mix`, QK-norm and rotary embedding; see `KVShift.forward`."""
        if self.after_norm and norms is not None:
            q, k, norms = norms[0](q), norms[1](k), None
        k, v, state = self.mix(k, v, state, mask=mask, seq_idx=seq_idx)
        q, k, v, _ = shift_norm_rope(q, k, v, None, None, rotary=rotary, norms=norms, keep_state=False)  # type: ignore[assignment]  # queries were given
        return q, k, v, state if keep_state else None


class AttentionMixin(ShiftedAttention):
    """A mixin for the attention of the Llamas and of the lab's GPT-2, which has no cache.

    A variant implements `attend`, a function of the finished queries, keys and values, and prepends its class to that
    of each attention (see `prepend_class`).
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        next_token: Any = None,  # for the one call of the package's own attention
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = shift_and_cache(
            self.shift,
            *self.project(hidden_states),
            past_key_values if cache is None else cache,
            self.layer_idx,
            mask=options["shift_mask"],
            seq_idx=options["shift_seq_idx"],
            rotary=position_embeddings,
            norms=(self.q_norm, self.k_norm) if self.qk_norm else None,
        )
        output, weights = self.attend(query, key, value, attention_mask=attention_mask, **options)
        return self.output(output), weights

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output of attention, (B, T, heads, size), and its weights or None.

        Args:
            query: (B, H, T, D).
            key, value: (B, G, K, D).
            options: attention_mask, shift_mask and shift_seq_idx from `create_masks`, and the layer's other arguments.
        """
        raise NotImplementedError

    def softmax_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention with the configured implementation; H must be G times `num_key_value_groups`."""
        implementation = options.pop("attn_implementation", None) or self.config._attn_implementation
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        for name in ("shift_mask", "shift_seq_idx"):
            options.pop(name, None)
        return attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **options,
        )
