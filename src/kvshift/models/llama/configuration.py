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
        sliding_window: each token attends to this many tokens, itself included; None for all.

    `layer_types` follows from these fields and is not set by hand: it tells transformers' caches that every layer
    keeps the last raw keys and values beside the shifted ones.
    """

    model_type = "kvshift_llama"
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        **LlamaConfig.base_model_tp_plan,
        # Coefficients are sharded like the heads they belong to.
        "layers.*.self_attn.shift.alpha": "colwise",
        "layers.*.self_attn.shift.beta": "colwise",
        "layers.*.self_attn.shift.gamma": "colwise",
    }

    shift_targets: list[str] | tuple[str, ...] = ("k", "v")
    shift_window: int = 2
    shift_constraint: str = "free"
    shift_init: str = "uniform"
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_misspelt(kwargs)
        check_shift_options(
            self.shift_targets, self.shift_window, self.shift_constraint, self.shift_init, prefix="shift_"
        )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, or None, got {self.sliding_window}")
        self.shift_targets = list(self.shift_targets)
        sliding = self.sliding_window is not None
        if self.shift_targets:
            layer_type = "hybrid_sliding" if sliding else "hybrid"
        else:
            layer_type = "sliding_attention" if sliding else "full_attention"
        self.layer_types = [layer_type] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    def _refuse_misspelt(self, unknown: dict[str, Any]) -> None:
        """Transformers keeps unknown fields as attributes; one that looks like a known field is a mistake."""
        known = [field.name for field in fields(self)]
        for name in unknown:
            close = get_close_matches(name, known, n=1, cutoff=0.85)
            if close or name.startswith("shift_"):
                hint = close[0] if close else ", ".join(field for field in known if field.startswith("shift_"))
                raise ValueError(f"unknown configuration field {name!r} (value {unknown[name]!r}); known: {hint}")
