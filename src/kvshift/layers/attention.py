"""A complete attention layer with KV shift, for custom models in plain PyTorch.

Shapes: B batch, T positions, S sequences, N cached keys, K keys attended to, H query heads, G KV heads, D head size,
E model width. L is B, or 1 if all rows are equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvshift.layers.attention_state import AttentionState, flush_right
from kvshift.layers.options import ShiftOptions
from kvshift.layers.positions import (
    Positions,
    alibi_slopes,
    cached_positions,
    compute_positions,
    rotary_table,
    visible_keys,
)
from kvshift.layers.sequence_sharding import refuse_sharded_sequence
from kvshift.layers.shift import KVShift, require_targets
from kvshift.ops import ShiftState
from kvshift.ops.dispatch import register_norm
from kvshift.ops.shift import check_boundaries, check_tensor

PositionEncoding = Literal["rope", "alibi", "none"]


class KVShiftAttention(nn.Module):
    """Causal self-attention whose keys and values are mixed with those of the previous token.

        q, k, v = heads of  W_q x, W_k x, W_v x
        k, v = KVShift(k, v)                               then, if requested,
        q, k = RMSNorm(q), RMSNorm(k)                      QK-norm
        q, k = RoPE(q), RoPE(k)                            or ALiBi, added to the scores
        out = W_o softmax(q k^T / sqrt(D)) v               over keys  t - sliding_window < s <= t

    Training, prefill in one or several chunks, and decoding use the same call, which takes a state and returns one.
    Feeding a sequence in pieces, each with the state that the previous call returned, gives the same result as feeding
    it whole.

        layer = KVShiftAttention(embed_dim=64, num_heads=4)
        out, _ = layer(x)                                  training
        out, state = layer(prompt)                         prefill
        out, state = layer(next_token, state=state)        decoding

    Args:
        embed_dim: width of the model, E.
        num_heads: number of query heads, H.
        num_kv_heads: number of KV heads, G, a divisor of H; H by default. Query head h uses KV head h // (H / G).
        head_dim: head size, D; E / H by default.
        position_encoding: "rope" (split-half pairs, as in Llama), "alibi" or "none".
        rope_base: base of the rotary frequencies.
        qk_norm: whether to apply RMSNorm to each query and key head (eps 1e-5, one learned gain of D numbers for all
            query heads and one for all key heads).
        sliding_window: number of tokens that each token attends to, including itself. None for all previous tokens.
        bias: whether the four projections have a bias.
        dropout: dropout probability of the attention weights in training.
        shift_options: which tensors are shifted, and how. `ShiftOptions(targets=())` gives plain attention.
        max_rollback: number of tokens that `AttentionState.crop` can remove, for rejected drafts. The state keeps this
            many additional raw keys and values.
        device, dtype: device and dtype of the parameters. The coefficients of the shift are always float32.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: the linear projections.
        q_norm, k_norm: the norms; only with `qk_norm`.
        shift: the `KVShift`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        position_encoding: PositionEncoding = "rope",
        rope_base: float = 10_000.0,
        qk_norm: bool = False,
        sliding_window: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        shift_options: ShiftOptions = ShiftOptions(),
        max_rollback: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, value in {**sizes, "head_dim": head_dim, "sliding_window": sliding_window}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, {num_heads}; got {num_kv_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, {num_heads}, unless head_dim is given; got {embed_dim}"
            )
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if position_encoding not in ("rope", "alibi", "none"):
            raise ValueError(f'position_encoding must be "rope", "alibi" or "none", got {position_encoding!r}')
        if position_encoding == "rope" and head_dim % 2:
            raise ValueError(f'head_dim must be even with position_encoding="rope", got {head_dim}')
        if not rope_base > 0:
            raise ValueError(f"rope_base must be above 0, got {rope_base}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        if max_rollback < 0:
            raise ValueError(f"max_rollback must be 0 or more, got {max_rollback}")

        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, num_kv_heads, head_dim
        self.position_encoding = position_encoding
        self.rope_base = rope_base
        self.qk_norm = qk_norm
        self.sliding_window = sliding_window
        self.dropout = dropout
        self.max_rollback = max_rollback
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias, **factory)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias, **factory)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias, **factory)
        self.o_proj = nn.Linear(num_heads * head_dim, embed_dim, bias, **factory)
        if qk_norm:
            self.q_norm = HeadNorm(head_dim, eps=1e-5, **factory)
            self.k_norm = HeadNorm(head_dim, eps=1e-5, **factory)
        self.shift = KVShift(num_kv_heads, shift_options, num_heads=num_heads, device=device)

    def reset_parameters(self) -> None:
        """Initialise the parameters again, as `torch.nn.Linear`, `torch.nn.RMSNorm` and `KVShift` do."""
        for module in self.children():
            cast(Any, module).reset_parameters()

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        positions: Tensor | None = None,
        state: AttentionState | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """Compute attention for the tokens of x, after those of `state`.

        Args:
            x: input, (B, T, E).
            mask: False on padding, (B, T) bool, for the positions of this call only. Padding may be on the left, on the
                right or in between. There, the output is zero and the input has no effect.
            cu_seqlens: boundaries of the sequences packed into the single row of x (B = 1), (S + 1,) int32 or int64,
                from 0 to T, never decreasing. No token attends across them.
            seq_idx: number of the document at each position, (B, T) integers; a document begins where it changes. The
                first document of a row continues `state`, and the new state belongs to the last. Cannot be combined
                with `cu_seqlens`.
            positions: positions for the rotary embedding, (B, T). By default, the real tokens of each document are
                counted, including those of `state`.
            state: state returned by an earlier call for the same B rows or S sequences. None if they begin here.

        Returns:
            The output, (B, T, E), and the new state.

        Raises:
            TypeError, ValueError: an argument has the wrong type, dtype, device or shape; the message names it.
        """
        require_targets(self.shift)
        if self.shift.targets:
            refuse_sharded_sequence()
        self._check(x, positions)
        boundaries: dict[str, Any] = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "mask": mask}
        sequences = check_boundaries(x, **boundaries)
        bounded = any(tensor is not None for tensor in boundaries.values())
        if mask is not None:
            x = torch.where(mask.unsqueeze(2), x, 0)
        q, k, v = (
            projection(x).unflatten(2, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if state is not None:
            state = self._check_state(state, sequences, k)
        start = self._initial_state(sequences, k) if state is None else state.shift
        batch, length = x.shape[:2]
        current, seen = compute_positions(
            batch, length, x.device, seen=None if state is None else state.seen, **boundaries
        )
        rotary = None
        if self.position_encoding == "rope":
            rotary_positions = current.rank if positions is None else positions
            rotary = rotary_table(rotary_positions, self.head_dim, self.rope_base, q.dtype)
        finish = {"rotary": rotary, "norms": (self.q_norm, self.k_norm) if self.qk_norm else None}
        q, k, v, next_state = self.shift(q, k, v, state=start, **boundaries, **finish)
        key_positions = current
        if state is not None:
            past_k, past_v, past_positions = self._visible_cache(state, packed=cu_seqlens is not None)
            k, v = torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)
            key_positions = past_positions.followed_by(current)

        plain = state is None and not bounded and self.sliding_window is None and self.position_encoding != "alibi"
        bias = None if plain else self._bias(current, key_positions, q.dtype)
        out = self.o_proj(self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias))
        if mask is not None:
            out = torch.where(mask.unsqueeze(2), out, 0)

        packed = None
        if cu_seqlens is not None:
            packed = torch.where(key_positions.rank >= 0, key_positions.document, -1).squeeze(0)
        elif bounded:  # the next token sees the real keys of the last document of each row
            is_visible = (key_positions.rank >= 0) & (key_positions.document == key_positions.document[:, -1:])
            k, v = flush_right(k, v, is_visible, k.shape[1])
        if state is None:
            return out, AttentionState(k, v, seen, next_state, self.max_rollback, self.max_rollback, packed)
        # With boundaries, a sequence may have fewer tokens than positions, so its state has not grown.
        rollback = min(state.max_rollback, state.rollback + (0 if bounded else length))
        return out, AttentionState(k, v, seen, next_state, rollback, state.max_rollback, packed)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, position_encoding={self.position_encoding!r}, "
            f"sliding_window={self.sliding_window}, dropout={self.dropout}, max_rollback={self.max_rollback}"
        )

    def _initial_state(self, sequences: int, k: Tensor) -> ShiftState | None:
        """Return the initial state of the shift if more rows are kept than its window needs; otherwise None."""
        if not (self.shift.targets and self.max_rollback):
            return None
        rows = self.shift.options.window - 1 + self.max_rollback
        start = ShiftState.zeros(sequences, self.num_kv_heads, self.head_dim, rows=rows, dtype=k.dtype, device=k.device)
        if "q" not in self.shift.targets:
            return start
        return replace(start, q=k.new_zeros(sequences, rows, self.num_heads, self.head_dim))

    def _visible_cache(self, state: AttentionState, packed: bool) -> tuple[Tensor, Tensor, Positions]:
        """Return the cached keys and values that can still be seen, and their positions; in one row for a pack."""
        k, v = state.k, state.v
        if self.sliding_window is not None:  # a roll-back brings older keys into the window
            first = max(0, k.shape[1] - (self.sliding_window - 1 + state.max_rollback))
            k, v = k[:, first:], v[:, first:]
        current = cached_positions(state.seen, k.shape[1], packed)
        return (k.flatten(0, 1).unsqueeze(0), v.flatten(0, 1).unsqueeze(0), current) if packed else (k, v, current)

    def _bias(self, queries: Positions, keys: Positions, dtype: torch.dtype) -> Tensor:
        """Return the attention mask: (L, 1, T, K) booleans or, with ALiBi, (L, H, T, K) terms to add to the scores."""
        seen_LTK = visible_keys(queries, keys, self.sliding_window).unsqueeze(1)
        if self.position_encoding != "alibi":
            return seen_LTK
        compute = torch.promote_types(dtype, torch.float32)
        slope_H11 = torch.tensor(alibi_slopes(self.num_heads), dtype=compute, device=seen_LTK.device)[:, None, None]
        distance_LTK = (queries.rank.unsqueeze(2) - keys.rank.unsqueeze(1)).unsqueeze(1)
        return torch.where(seen_LTK, -slope_H11 * distance_LTK, -torch.inf).to(dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Attend, causally without a bias: (B, H, T, D), (B, G, K, D), (B, G, K, D) -> (B, T, H * D)."""
        grouped = self.num_kv_heads < self.num_heads
        if grouped and bias is not None:  # kernels that take a bias do not take grouped heads
            k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=bias is None,
            enable_gqa=grouped and bias is None,
        )
        return out.transpose(1, 2).flatten(2)

    def _check(self, x: Tensor, positions: Tensor | None) -> None:
        check_tensor("x", x, f"(batch, positions, {self.embed_dim})")
        if x.ndim != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must be (batch, positions, {self.embed_dim}), got {tuple(x.shape)}")
        if positions is None:
            return
        if self.position_encoding != "rope":
            raise ValueError(f'positions must be None with position_encoding="{self.position_encoding}"')
        check_tensor("positions", positions, f"{tuple(x.shape[:2])} or None")
        if positions.shape != x.shape[:2] or positions.device != x.device:
            raise ValueError(
                f"positions must be {tuple(x.shape[:2])} on {x.device}, "
                f"got {tuple(positions.shape)} on {positions.device}"
            )

    def _check_state(self, state: AttentionState, sequences: int, k: Tensor) -> AttentionState:
        if not isinstance(state, AttentionState):
            raise TypeError(f"state must be an AttentionState or None, got {type(state).__name__}")
        if state.sequences != sequences:
            raise ValueError(f"state must have {sequences} sequences, got {state.sequences}")
        if state.k.shape[2:] != k.shape[2:] or state.k.dtype != k.dtype or state.k.device != k.device:
            raise ValueError(
                f"state.k must be ({sequences}, keys, {self.num_kv_heads}, {self.head_dim}) {k.dtype} on {k.device}, "
                f"got {tuple(state.k.shape)} {state.k.dtype} on {state.k.device}"
            )
        if self.shift.targets and state.shift is None:
            raise ValueError("state.shift is None, but this layer shifts: pass the state that this layer returned")
        return state.unpack()


class HeadNorm(nn.RMSNorm):
    """RMSNorm computed in the dtype of the gain, which autocast leaves in float32, and rounded to the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


register_norm(HeadNorm)
