"""The models of variants that replace the shift of an attention by a `TokenMixing`.

Shapes: B batch, T positions, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvshift import KVShift
from kvshift.models.extending import add_child, shift_tokens
from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.variants.by_name import find_variant
from kvshift_lab.variants.model_classes import prepend_class, variant_class
from kvshift_lab.variants.small_gpt2 import LabGPT2
from kvshift_lab.variants.token_mixing import TokenMixing
from kvshift_lab.variants.variant import ModelVariant, Size


class Heads(NamedTuple):
    """Sizes of an attention (KV heads G, head size D, model width E) and the standard deviation of its new weights."""

    kv_heads: int
    size: int
    width: int
    initializer_range: float


def _place(model: Any) -> None:
    """Replace the shift of each attention by the variant that the configuration names."""
    config = model.config
    variant: Any = find_variant(config.mixing, "mixing")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    heads = Heads(kv_heads, size, config.hidden_size, config.initializer_range)
    for module in list(model.modules()):
        if isinstance(getattr(module, "shift", None), KVShift):
            add_child(module, "shift", variant.make(heads))
            if variant.attention is not None:
                prepend_class(module, variant.attention)


# The field `mixing` of their configurations names the variant; `shift_targets` and `shift_window` control caches.
_MODELS: Mapping[type[PreTrainedConfig], type[PreTrainedModel]] = {
    base.config_class: variant_class(base, "Mixing", _place, fields={"mixing": (str, "")})
    for base in (KVShiftLlamaForCausalLM, LabGPT2)
}


@dataclass(frozen=True, kw_only=True)
class MixingVariant(ModelVariant):
    """A variant that has a `TokenMixing` in each attention.

    Attributes:
        make: function that creates the `TokenMixing` of an attention with the given heads.
        attention: mixin for the class of each attention (see `prepend_class`), or None.
    """

    make: Callable[[Heads], TokenMixing]
    attention: type | None = None
    models: Mapping[type[PreTrainedConfig], type[PreTrainedModel]] = field(default_factory=lambda: _MODELS)

    def _described(self, size: Size) -> tuple[Any, Any]:
        model_class, config = super()._described(size)
        config.mixing = self.name
        return model_class, config


def tokens_before(x: Tensor, **boundaries: Any) -> tuple[Tensor, Tensor]:
    """Return x[t-1] for x (B, T, G, D), 0 where a document begins, and the next state, as `shift_tokens` does."""
    only_before_G2 = torch.tensor([[0.0, 1.0]], device=x.device).expand(x.shape[2], 2)
    return shift_tokens(x, only_before_G2, **boundaries)
