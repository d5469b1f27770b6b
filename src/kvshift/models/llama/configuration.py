"""Configuration of the Llama family with KV shift: Llama's own fields and the few that differ."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from kvshift.models.configuration import ShiftConfig


@strict
class KVShiftLlamaConfig(ShiftConfig, LlamaConfig):
    """What `KVShiftLlamaForCausalLM` is built from.

    Besides the fields of `transformers.LlamaConfig`, and those of `ShiftConfig`, which say what to shift:

    Args:
        qk_norm: RMSNorm over each query and key head, after the shift and before the rotary embedding.
        sliding_window: each token attends to this many tokens, itself included; 2 or more, or None for all.
    """

    loaded_by: ClassVar[str] = "kvshift.models.llama.KVShiftLlamaForCausalLM"
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

    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        window = self.sliding_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 2):
            raise ValueError(f"sliding_window must be an integer of at least 2, or None; got {window!r}")
        super().__post_init__(**kwargs)
