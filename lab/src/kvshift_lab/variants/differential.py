"""The Differential Transformer: each head subtracts one attention map from another, which cancels their common part.

    head = softmax(q1 k1^T / sqrt(d)) v - lambda softmax(q2 k2^T / sqrt(d)) v        q1, q2, k1, k2 of size d, v of 2d
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    lambda_init = 0.8 - 0.6 exp(-0.3 l)                                              l = 0 in the first layer
    output = (1 - lambda_init) RMSNorm(head)            over the 2d of each head, one gain for all of them, eps 1e-5

The four vectors lambda_.. of each layer are initialised from N(0, 0.1^2). The two keys and the value of a KV head serve
as many query heads, each with a pair of queries, as in vanilla (grouped queries). Heads have vanilla's size, so d is
half of that size (12 x 32 at the paper's 0.2B) and all projections have vanilla's shapes. QK-norm, if configured, is
an RMSNorm over each of q1, q2, k1, k2, before the rotary embedding.

Dimensions 0 .. d/2 and d .. 3d/2 of a head belong to the first of its pair, the others to the second. The dimensions
that rotate together, and the two halves of all cached keys, are therefore where vanilla has them. The source splits a
head in the middle and rotates neighbouring dimensions; for randomly initialised weights, only the order differs.

Source: Ye et al., Differential Transformer (2024), equations 1 to 3 and section 3.1; their code
(microsoft/unilm, Diff-Transformer/multihead_flashdiff_1.py).

Shapes: B batch, T positions, K keys, H query heads, G KV heads, D = 2d head size.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward

from kvshift import KVShift, ShiftOptions
from kvshift.models.extending import ShiftedAttention, add_child
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.variants.model_classes import prepend_class, variant_class
from kvshift_lab.variants.small_gpt2 import LabGPT2, LabGPT2Config
from kvshift_lab.variants.variant import ModelVariant


def split_pair(x: Tensor) -> Tensor:
    """Split heads (B, H, T, D) into their pairs, (B, 2H, T, D), each with the dimensions of the other set to 0.

    The product of either member with a whole key is then its product with the corresponding half of the key.
    """
    second_D = (torch.arange(x.shape[-1], device=x.device) // (x.shape[-1] // 4)) % 2 == 1
    pair_2D = torch.stack([~second_D, second_D]).unsqueeze(1)
    return (x.unsqueeze(2) * pair_2D).flatten(1, 2)


class Differential(nn.Module):
    """Combines the attention outputs of each pair by the formula above.

    Args:
        head_size: D.
        layer_idx: l.

    Attributes:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: (d,).
        norm: RMSNorm over each head; its gain is (D,).
    """

    def __init__(self, head_size: int, layer_idx: int) -> None:
        super().__init__()
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(head_size // 2).normal_(0, 0.1)) for _ in range(4)
        )
        self.norm = nn.RMSNorm(head_size, eps=1e-5)

    def forward(self, heads: Tensor) -> Tensor:
        """Combine (B, T, 2H, D) to (B, T, H, D), computed in float32 (float64 for float64) and rounded once."""
        dtype = torch.promote_types(heads.dtype, torch.float32)
        first, second = heads.to(dtype).unflatten(2, (-1, 2)).unbind(3)
        pairs = (self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2)
        one, two = (torch.exp((q.to(dtype) * k.to(dtype)).sum()) for q, k in pairs)
        scale = one - two + self.lambda_init
        normed = F.rms_norm(first - scale * second, self.norm.normalized_shape, self.norm.weight.to(dtype), 1e-5)
        return (normed * (1 - self.lambda_init)).to(heads.dtype)


class PairNorm(nn.Module):
    """RMSNorm over each member of the pairs in query or key heads, (..., D), with one gain (d,) for all."""

    def __init__(self, head_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(head_size // 2))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        chunks = x.to(dtype).unflatten(-1, (2, 2, -1))  # axes: half of the rotated dimensions, member of the pair, rest
        normed = chunks * torch.rsqrt(chunks.square().mean((-3, -1), keepdim=True) + self.eps)
        gain = self.weight.to(dtype).unflatten(0, (2, 1, -1))
        return (normed * gain).flatten(-3).to(x.dtype)


class PairRotaryEmbedding(LlamaRotaryEmbedding):
    """Rotary tables of head size D, in which the tables of size d are repeated for both members of a pair."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(x, position_ids)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


class _DifferentialAttention(ShiftedAttention):
    differential: Differential
    eager_attention = staticmethod(eager_attention_forward)  # in GPT-2 too

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        heads, weights = super().attend(split_pair(query), key, value, **options)
        return self.differential(heads), weights


def _differ(model: Any) -> None:
    """Make a Llama differential, in place. A shift mixes both keys of a KV head with the same coefficients."""
    config = model.config
    kv_heads, merged = config.num_key_value_heads, 2 if config.halve_heads else 1
    if kv_heads % merged:
        raise ValueError(f"num_key_value_heads must be even with halve_heads, got {kv_heads}")
    size = merged * config.head_dim
    if size % 4:
        raise ValueError(f"the head size must be a multiple of 4 (two halves, each rotated in pairs), got {size}")
    of_half = deepcopy(config)
    of_half.head_dim = size // 2
    model.model.rotary_emb = PairRotaryEmbedding(of_half)
    options = ShiftOptions.of(config)
    for layer in model.model.layers:
        attention = layer.self_attn
        _make_differential(attention, size, groups=config.num_attention_heads // kv_heads)
        shift = KVShift(kv_heads // merged, options, num_heads=config.num_attention_heads // merged)
        add_child(attention, "shift", shift)
        if config.qk_norm:
            attention.q_norm, attention.k_norm = (PairNorm(size, config.rms_norm_eps) for _ in range(2))


def _differ_gpt2(model: Any) -> None:
    size = model.config.n_embd // model.config.n_head
    if size % 4:
        raise ValueError(f"the head size must be a multiple of 4 (two halves of two parts), got {size}")
    for block in model.transformer.h:
        _make_differential(block.attn, size, groups=1)


def _make_differential(attention: Any, head_size: int, *, groups: int) -> None:
    prepend_class(attention, _DifferentialAttention)
    attention.head_dim = head_size
    attention.scaling = (head_size // 2) ** -0.5
    attention.num_key_value_groups = 2 * groups
    add_child(attention, "differential", Differential(head_size, attention.layer_idx))


# `halve_heads` selects half as many query and KV heads, each twice as large, as in the source (6 x 64 at 0.2B).
_LLAMA = variant_class(KVShiftLlamaForCausalLM, "Differential", _differ, fields={"halve_heads": (bool, False)})
_OF_TEXT = {KVShiftLlamaConfig: _LLAMA}

MODEL_VARIANTS = (
    ModelVariant(
        name="differential", models={**_OF_TEXT, LabGPT2Config: variant_class(LabGPT2, "Differential", _differ_gpt2)}
    ),
    ModelVariant(name="differential-wide", models=_OF_TEXT, fields={"halve_heads": True}),
    # Here alpha mixes both keys of a KV head, and beta mixes its value.
    ModelVariant(name="differential-kv-shift", models=_OF_TEXT, fields={"shift_targets": ["k", "v"]}),
)
