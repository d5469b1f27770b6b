"""Models with KV shift in TransformerLens: hooks on raw and on shifted keys and values.

    lens = bridge(model)
    logits, cache = lens.run_with_cache(ids)

Embeddings, norms and MLPs have the hooks of TransformerLens's own adapter for the family. Attention is computed by the
model itself, with these hooks:

    blocks.L.attn.hook_q, hook_k, hook_v     (B, T, H or G, D) raw queries, keys and values, as projected
    blocks.L.attn.shift.hook_q               (B, T, H, D) after the shift
    blocks.L.attn.shift.hook_k, hook_v       (B, T, G, D) shifted, before QK-norm and rotary embedding
    blocks.L.attn.hook_pattern               (B, H, T, T) probabilities over the shifted keys; read-only
    blocks.L.attn.hook_z                     (B, T, H, D) output of each head, before the output projection

Shapes: B batch, T positions, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import MethodType
from typing import Any

from torch import Tensor
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import AttentionBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.model_bridge.supported_architectures import (
    LlamaArchitectureAdapter,
    MistralArchitectureAdapter,
    Qwen2ArchitectureAdapter,
    Qwen3ArchitectureAdapter,
)

from kvshift.ops import ShiftState
from kvshift.ops.arguments import Norms
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.rope import Rotary


class ShiftBridge(GeneralizedComponent):
    """A `KVShift` with hooks on its outputs, before QK-norm and rotary embedding."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()

    @property
    def targets(self) -> Any:
        """Targets of the shift, which the attention reads."""
        return self.original_component.targets

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotary: Rotary | None = None,
        norms: Norms | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor, ShiftState | None]:
        """Compute the same as `KVShift.forward`, and call the hooks before QK-norm and rotary embedding."""
        q, k, v, state = self.original_component(q, k, v, **options)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        q_done, k, v, _ = shift_norm_rope(q, k, v, None, None, rotary=rotary, norms=norms)
        return q_done, k, v, state  # type: ignore[return-value]  # queries were given


class ShiftedAdapter(ArchitectureAdapter):
    """A mixin for the adapter of a family, to let the model compute attention itself."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        blocks = self.component_mapping["blocks"].submodules
        projections = {name: blocks["attn"].submodules[name] for name in ("q", "k", "v", "o")}
        blocks["attn"] = AttentionBridge(
            name=blocks["attn"].name,
            config=self.cfg,
            submodules={**projections, "shift": ShiftBridge("shift")},
            maintain_native_attention=True,
            requires_attention_mask=True,
            requires_position_embeddings=True,
        )


_STOCK = {
    "Llama": LlamaArchitectureAdapter,
    "Mistral": MistralArchitectureAdapter,
    "Qwen2": Qwen2ArchitectureAdapter,
    "Qwen3": Qwen3ArchitectureAdapter,
}
ADAPTERS: dict[str, type[ShiftedAdapter]] = {
    f"KVShift{family}ForCausalLM": type(f"KVShift{family}Adapter", (ShiftedAdapter, stock), {})
    for family, stock in _STOCK.items()
}
"""Adapters by name of the model's class."""


def bridge(model: Any, tokenizer: Any = None) -> TransformerBridge:
    """Return a TransformerBridge around a loaded model with KV shift. The model is changed in place.

    Args:
        model: a model of a class in `ADAPTERS`. Its attention is set to "eager", the only one to return probabilities.
        tokenizer: tokenizer for inputs that are texts instead of token ids.

    Raises:
        TypeError: the class of the model is not in `ADAPTERS`.
        ValueError: `enable_compatibility_mode` or `process_weights` of the result is called with `fold_value_biases`,
            and the model shifts values that have a bias.
    """
    name = type(model).__name__
    if name not in ADAPTERS:
        raise TypeError(f"model must be one of {', '.join(ADAPTERS)}, got a {name}")
    model.set_attn_implementation("eager")
    ArchitectureAdapterFactory.register_adapter(name, ADAPTERS[name])
    biased = any(parameter.endswith("v_proj.bias") for parameter, _ in model.named_parameters())
    lens = build_bridge_from_module(model, name, hf_config=model.config, tokenizer=tokenizer)
    if biased and "v" in model.config.shift_targets:
        for method in ("enable_compatibility_mode", "process_weights"):
            setattr(lens, method, MethodType(_refuse_folded_values(getattr(type(lens), method)), lens))
    return lens


def _refuse_folded_values(process: Callable) -> Callable:
    """Let a function raise a ValueError for `fold_value_biases`, with which a bias would be passed on with weight 1."""

    @wraps(process)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature(process).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["fold_value_biases"] and not given.arguments.get("no_processing"):
            raise ValueError(
                "fold_value_biases must be False, got True: attention passes a bias of shifted values on with weight "
                "beta1 + beta2 (beta1 at the first token), not 1"
            )
        return process(*args, **kwargs)

    return checked
