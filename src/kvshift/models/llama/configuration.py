"""Configuration of the Llama family with KV shift: Llama's own fields and the few that differ."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from kvshift.layers import check_shift_options


@strict
class KVShiftLlamaConfig(LlamaConfig):
    """What `KVShiftLlamaForCausalLM` is built from.

    Besides the fields of `transformers.LlamaConfig`:

    Args:
        shift_targets: which of "q", "k", "v" each layer shifts; () is Llama itself.
        shift_window: tokens mixed, the current one included; 2 in the paper.
        shift_constraint: "free", "gate" or "clamp"; see `kvshift.KVShift`.
        shift_init: "uniform" (the paper's, for training from scratch) or "identity" (a pretrained model computes what
            it did before).
        qk_norm: RMSNorm over each query and key head, after the shift and before the rotary embedding.
        sliding_window: each token attends to this many tokens, itself included; 2 or more, or None for all.
    """

    model_type = "kvshift_llama"
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        **(LlamaConfig.base_model_tp_plan or {}),
        # Coefficients are sharded like the heads they belong to.
        "layers.*.self_attn.shift.alpha": "colwise",
        "layers.*.self_attn.shift.beta": "colwise",
        "layers.*.self_attn.shift.gamma": "colwise",
        # All heads share one norm, and every rank sees the gradient of its own heads alone.
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    }

    shift_targets: list[str] | tuple[str, ...] = ("k", "v")
    shift_window: int = 2
    shift_constraint: str = "free"
    shift_init: str = "uniform"
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_misspelt(kwargs)
        check_shift_options(
            self.shift_targets, self.shift_window, self.shift_constraint, self.shift_init, prefix="shift_"
        )
        self.shift_targets = list(self.shift_targets)
        window = self.sliding_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 2):
            raise ValueError(f"sliding_window must be an integer of at least 2, or None; got {window!r}")
        layer_types = kwargs.pop("layer_types", None)
        if layer_types is not None and layer_types != self.layer_types:
            raise ValueError(
                f"layer_types must be left out or {self.layer_types}, as the other fields have it; got {layer_types!r}"
            )
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """Tells transformers' caches that every layer keeps the last raw keys and values beside the shifted ones."""
        if self.shift_targets:
            layer_type = "hybrid" if self.sliding_window is None else "hybrid_sliding"
        else:
            layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
        return [layer_type] * self.num_hidden_layers

    def _refuse_misspelt(self, unknown: dict[str, Any]) -> None:
        """Transformers keeps unknown fields as attributes; one that looks like a known field is a mistake."""
        known = [field.name for field in fields(self)]
        for name in unknown:
            close = get_close_matches(name, known, n=1, cutoff=0.85)
            if close or name.startswith("shift_"):
                hint = close[0] if close else ", ".join(field for field in known if field.startswith("shift_"))
                raise ValueError(f"unknown configuration field {name!r} (value {unknown[name]!r}); known: {hint}")
