"""Configuration of the Llama family with KV shift, and of the paper's models by size."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from kvshift.models.configuration import ShiftConfig
from kvshift.models.paper_sizes import SIZES


@strict
class KVShiftLlamaConfig(ShiftConfig, LlamaConfig):
    """Configuration of `KVShiftLlamaForCausalLM`.

    It has the fields of `transformers.LlamaConfig`, those of `ShiftConfig`, which say what to shift, and:

    Args:
        qk_norm: whether to apply RMSNorm to each query and key head, after the shift and before the rotary embedding.
        sliding_window: number of tokens that each token attends to, itself included; 2 or more, or None for all.
    """

    loaded_by: ClassVar[str] = "kvshift.models.llama.KVShiftLlamaForCausalLM"
    model_type = "kvshift_llama"
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        **(LlamaConfig.base_model_tp_plan or {}),
        # Coefficients are sharded like their heads.
        "layers.*.self_attn.shift.alpha": "colwise",
        "layers.*.self_attn.shift.beta": "colwise",
        "layers.*.self_attn.shift.gamma": "colwise",
        # All heads share one norm, and each rank computes only the part of its gradient that comes from its heads.
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


def size_config(name: str, **changes: Any) -> KVShiftLlamaConfig:
    """Return the configuration of one of the paper's models.

        config = size_config("1.5B", shift_targets=())  # the same model without shift

    Args:
        name: "0.2B" (tables 6 to 13), "1.5B", "2.9B", "6.7B", "13B" or "19B" (tables 1 and 16).
        changes: fields of `KVShiftLlamaConfig` to override.
    """
    if name not in SIZES:
        raise ValueError(f"name must be one of {', '.join(SIZES)}; got {name!r}")
    return KVShiftLlamaConfig(**{**SIZES[name], **changes})
