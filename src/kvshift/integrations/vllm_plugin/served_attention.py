"""Attention over shifted keys and values in vLLM, for all families with rotary embeddings.

Shapes: P positions in the pack, H query heads, G KV heads of this rank, D head size, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index

from kvshift.integrations.vllm_plugin.paged_attention import AttentionWithRawRows
from kvshift.integrations.vllm_plugin.paged_shift import PagedShift
from kvshift.layers import ShiftOptions
from kvshift.models.retrofit import FAMILIES


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The attention options of one layer; the families differ in nothing else.

    Attributes:
        heads, kv_heads: number of query heads and of KV heads, of all ranks together.
        size: D.
        bias, output_bias: whether the projections of q, k and v have a bias, and whether the output projection has one.
        qk_norm: whether heads are normalised between shift and rotary embedding.
        window: number of tokens that each token attends to, itself included; None for all.
    """

    heads: int
    kv_heads: int
    size: int
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int | None = None


def get_attention_options(config: Any, layer: int) -> AttentionOptions:
    """Return the attention options of one layer, from a configuration of transformers."""
    window = config.sliding_window if "sliding" in config.layer_types[layer] else None
    if config.model_type == "baichuan_m1":
        heads, kv_heads = config.heads(layer)
        return AttentionOptions(heads=heads, kv_heads=kv_heads, size=config.hidden_size // heads, window=window)
    family = next(family for family in FAMILIES if family.config.model_type == config.model_type)
    heads, kv_heads = family.heads(config)
    return AttentionOptions(
        heads=heads,
        kv_heads=kv_heads,
        size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        bias=config.attention_bias if family.bias is None else family.bias,
        output_bias=config.attention_bias if family.output_bias is None else family.output_bias,
        qk_norm=getattr(config, "qk_norm", family.qk_norm),
        window=window,
    )


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Return the parameters of the rotary embedding.

    "dynamic" changes no angle up to `max_position_embeddings`, beyond which `start_checks` refuses it.
    """
    rotary = config.rope_parameters
    return rotary | {"rope_type": "default"} if rotary.get("rope_type") == "dynamic" else rotary


class ServedAttention(nn.Module):
    """Attention with a shift, made of vLLM's projections, and with QK-norm if the family has it.

    Args:
        config: configuration of transformers.
        hidden_size: E.
        num_heads, num_kv_heads, bias, bias_o_proj, attn_type: passed by `LlamaDecoderLayer`, but not used:
            `get_attention_options` determines them.
        max_position_embeddings: number of positions in the rotary tables.
        quant_config: how projections are quantized; None if they are not.
        cache_config: options of vLLM's KV cache.
        prefix: name of this module in the model, with the number of the layer.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position_embeddings: int,
        quant_config: Any,
        bias: bool,
        bias_o_proj: bool,
        cache_config: Any,
        prefix: str,
        attn_type: str,
    ) -> None:
        super().__init__()
        own, shift_options = get_attention_options(config, extract_layer_index(prefix)), get_shift_options(config)
        self.head_dim = own.size
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            own.size,
            own.heads,
            own.kv_heads,
            bias=own.bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            own.heads * own.size,
            hidden_size,
            bias=own.output_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(
            own.size, max_position=max_position_embeddings, rope_parameters=_rope_parameters(config)
        )
        self.q_norm = self.k_norm = None
        if own.qk_norm:
            self.q_norm = RMSNorm(own.size, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(own.size, eps=config.rms_norm_eps)
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads  # of this rank
        self.q_size, self.kv_size = heads * own.size, kv_heads * own.size
        options: dict[str, Any] = {
            "num_kv_heads": kv_heads,
            "cache_config": cache_config,
            "quant_config": quant_config,
            "per_layer_sliding_window": own.window,
            "prefix": f"{prefix}.attn",
        }
        self.shift, attention = None, Attention
        if shift_options.targets:
            self.shift = PagedShift(own.kv_heads, own.size, shift_options, f"{prefix}.attn", f"{prefix}.shift")
            attention = partial(AttentionWithRawRows, shift_window=shift_options.window)
        self.attn = attention(heads, own.size, own.size**-0.5, **options)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the output, (P, E), for hidden states (P, E) at positions (P,)."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, kv = qkv.split([self.q_size, 2 * self.kv_size], dim=-1)
        if self.shift is not None:
            raw, kv = kv, torch.empty_like(kv)
            torch.ops.vllm.kv_shift(raw, kv, self.shift.prefix)
        k, v = kv.chunk(2, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normalised(self.q_norm, q), self._normalised(self.k_norm, k)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output

    def _normalised(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return norm(x.view(*x.shape[:-1], -1, self.head_dim)).view(x.shape)


def get_shift_options(config: Any) -> ShiftOptions:
    """Return the shift options of a configuration; a configuration of Baichuan-M1 has only targets and window."""
    if hasattr(config, "shift_constraint"):
        return ShiftOptions.of(config)
    return ShiftOptions(targets=config.shift_targets, window=config.shift_window)
