"""The partial key offset: half of each key head is the token's before, so that one layer can be an induction head.

    y[t, d] = k[t-1, d] for d in D/4 .. D/2 and 3D/4 .. D,    k[t, d] for the others and where a document begins

It stands in the place of the shift, after the projections and before QK-norm and rotary embedding, whose slow half of
frequencies these are. Nothing is learned.

Source: modded-nanogpt (pull request 169), where these dimensions are not rotated, documents are not kept apart, and
the keys are changed in place, through a view of themselves.

Shapes: B batch, T positions, G KV heads, D head size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from kvshift.lab.variants.small_gpt2 import LabGPT2, LabGPT2Config
from kvshift.lab.variants.uncached import (
    UncachedConfig,
    UncachedGeneration,
    UncachedGPT2Model,
    UncachedLlamaModel,
    become,
)
from kvshift.lab.variants.variant import ModelVariant
from kvshift.layers import KVShift, ShiftOptions
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.ops import shift_tokens

__all__ = ["VARIANT", "KeyOffset", "KeyOffsetGPT2", "KeyOffsetLlamaForCausalLM", "offset_keys"]


def offset_keys(k: Tensor, *, mask: Tensor | None = None, seq_idx: Tensor | None = None) -> Tensor:
    """The formula above.

    Args:
        k: (B, T, G, D), D a multiple of 4.
        mask, seq_idx: (B, T), as in `kvshift.kv_shift`.
    """
    fast_0, slow_0, fast_1, slow_1 = k.chunk(4, dim=-1)
    slow_BTGh = torch.cat([slow_0, slow_1], dim=-1)
    only_before_G2 = torch.tensor([[0.0, 1.0]], device=k.device).expand(k.shape[2], 2)
    marked = torch.cat([slow_BTGh, torch.ones_like(k[..., :1])], dim=-1)  # 0 comes back where there is none before
    before, has_one = shift_tokens(marked, only_before_G2, mask=mask, seq_idx=seq_idx)[0].split(
        [k.shape[-1] // 2, 1], -1
    )
    slow_0, slow_1 = torch.where(has_one != 0, before, slow_BTGh).chunk(2, dim=-1)
    return torch.cat([fast_0, slow_0, fast_1, slow_1], dim=-1)


class KeyOffset(KVShift):
    """Stands where an attention has its shift; `forward` is that of `KVShift`, after `offset_keys`."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__(num_kv_heads, ShiftOptions(targets=()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **where: Any) -> Any:
        return super().forward(q, offset_keys(k, mask=where.get("mask"), seq_idx=where.get("seq_idx")), v, **where)


@strict
class KeyOffsetLlamaConfig(UncachedConfig, KVShiftLlamaConfig):
    """The fields of `KVShiftLlamaConfig`."""

    model_type = "kvshift_key_offset_llama"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.key_offset.KeyOffsetLlamaForCausalLM"


class KeyOffsetLlamaForCausalLM(UncachedGeneration, KVShiftLlamaForCausalLM):
    """`KVShiftLlamaForCausalLM` with offset keys."""

    config: KeyOffsetLlamaConfig
    config_class = KeyOffsetLlamaConfig

    def __init__(self, config: KeyOffsetLlamaConfig) -> None:
        super().__init__(config)
        become(self.model, UncachedLlamaModel)
        _offset_layers(self, config.head_dim, config.num_key_value_heads)


@strict
class KeyOffsetGPT2Config(UncachedConfig, LabGPT2Config):
    """The fields of `LabGPT2Config`."""

    model_type = "kvshift_key_offset_lab_gpt2"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.key_offset.KeyOffsetGPT2"


class KeyOffsetGPT2(LabGPT2):
    """`LabGPT2` with offset keys."""

    config: KeyOffsetGPT2Config
    config_class = KeyOffsetGPT2Config

    def __init__(self, config: KeyOffsetGPT2Config) -> None:
        super().__init__(config)
        become(self.transformer, UncachedGPT2Model)
        _offset_layers(self, config.n_embd // config.n_head, config.n_head)


def _offset_layers(model: nn.Module, head_size: int, num_kv_heads: int) -> None:
    if head_size % 4:
        raise ValueError(f"key-offset needs heads whose size is a multiple of 4, got {head_size}")
    for module in list(model.modules()):
        if isinstance(getattr(module, "shift", None), KVShift):
            module.shift = KeyOffset(num_kv_heads)


VARIANT = ModelVariant(
    name="key-offset",
    models={KVShiftLlamaConfig: KeyOffsetLlamaForCausalLM, LabGPT2Config: KeyOffsetGPT2},
)
