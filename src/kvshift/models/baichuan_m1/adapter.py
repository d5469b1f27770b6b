"""LoRA on the head of Baichuan-M1. This module imports peft.

Shapes: E model width, V vocabulary, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn import functional

from kvshift.models.baichuan_m1.head import NormHead, row_lengths

_INIT = (True, False, "gaussian", "orthogonal")  # initialisations that do not change the weight


class LoraNormHead(LoraLinear):
    """A NormHead whose raw matrix has a LoRA update; the rows of the sum are normalised to length 1.

        logits[v] = x . (raw + s B A)[v] / (|(raw + s B A)[v]| + 1e-7)

    The released layout can therefore hold the merged matrix. `forward` gets the lengths without the sum, (V, E), from

        |(raw + B A)[v]|^2 = |raw[v]|^2 + 2 B[v] . (raw A^T)[v] + B[v] . (B A A^T)[v],  B (V, r) including s
    """

    def update_layer(self, adapter_name: str, *args: Any, config: Any, **kwargs: Any) -> None:
        refuse_others(config)
        super().update_layer(adapter_name, *args, config=config, **kwargs)

    @property
    def weight(self) -> Tensor:
        """Matrix (V, E) that multiplies the hidden states: rows of length 1, adapters included; differentiable."""
        head, active = self._head, self._unmerged()
        if not active:
            return head.weight
        matrix = head.raw + sum(self.get_delta_weight(name) for name in active)
        return (matrix / row_lengths(matrix)[:, None]).to(head.raw.dtype)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("adapter_names cannot be given with an adapter on lm_head: activate one adapter at a time")
        if self.disable_adapters and self.merged:
            self.unmerge()
        head, active = self._head, self._unmerged()
        if not active:
            return head(x)
        logits = functional.linear(x, head.raw)
        dtype = logits.dtype
        for name in active:
            a, b, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
            logits = logits + b(a(dropout(x.to(a.weight.dtype)))) * self.scaling[name]
        lengths = self._row_lengths(head.raw, active)
        return (logits.to(lengths.dtype) / lengths).to(dtype)

    @property
    def _head(self) -> Any:
        return self.base_layer

    def _unmerged(self) -> list[str]:
        """Return the names of the active adapters that are not merged into the raw matrix."""
        return [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]

    def _row_lengths(self, raw: Tensor, active: list[str]) -> Tensor:
        wide = torch.promote_types(raw.dtype, torch.float32)
        a = torch.cat([self.lora_A[name].weight.to(wide) for name in active])
        b = torch.cat([self.lora_B[name].weight.to(wide) * self.scaling[name] for name in active], dim=1)
        with_raw = functional.linear(raw, a.to(raw.dtype)).to(wide)  # raw A^T, (V, r)
        squares = torch.linalg.vector_norm(raw, dim=1, dtype=wide).square()
        squares = squares + (b * (2 * with_raw + b @ (a @ a.T))).sum(1)
        return squares.clamp(min=torch.finfo(wide).tiny).sqrt() + 1e-7

    def merge(self, *args: Any, **kwargs: Any) -> None:
        with self._head.showing_raw():
            super().merge(*args, **kwargs)

    def unmerge(self) -> None:
        with self._head.showing_raw():
            super().unmerge()


def as_adapter(module: Any) -> nn.Module:
    """Convert the module by which peft replaces a NormHead, or raise a TypeError if it is not supported."""
    kind = type(module)
    if kind is ModulesToSaveWrapper or kind is LoraNormHead:
        return module
    if kind is LoraLinear and isinstance(module.get_base_layer(), NormHead):
        if module.lora_variant or any(module.lora_bias.values()):
            raise _refusal("a variant of LoRA, or lora_bias=True")
        module.__class__ = LoraNormHead
        return module
    raise _refusal(f"peft's {kind.__name__}")


def refuse_others(config: Any) -> None:
    """Raise a TypeError for a LoRA configuration that reads or writes the weight of the head in an unsupported way."""
    if config.init_lora_weights not in _INIT:
        raise _refusal(f"init_lora_weights={config.init_lora_weights!r}")
    if config.lora_bias:
        raise _refusal("lora_bias=True")
    if config.use_dora:
        raise _refusal("use_dora=True")


def _refusal(what: str) -> TypeError:
    return TypeError(
        f"lm_head, which scales its rows to length 1, cannot have {what}: merging would change results. Use plain "
        'LoRA with target_modules, or modules_to_save=["lm_head"], or leave lm_head out'
    )
