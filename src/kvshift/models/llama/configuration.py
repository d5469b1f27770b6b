"""Configuration of the Llama family with KV shift, and of the paper's models by size."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from kvshift.layers.shift import COEFFICIENT_NAMES
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
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        window = self.sliding_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 2):
            raise ValueError(f"sliding_window must be an integer of at least 2, or None; got {window!r}")
        super().__post_init__(**kwargs)

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]
        """Plan of tensor parallelism, for exactly the modules that the model has."""
        attention = "layers.*.self_attn"
        plan = dict(vars(self).get("base_model_tp_plan") or LlamaConfig.base_model_tp_plan or {})
        for target in self.shift_targets:  # coefficients are sharded like their heads
            plan[f"{attention}.shift.{COEFFICIENT_NAMES[target]}"] = "colwise"
        if self.qk_norm:  # shared by all heads: each rank has the part of their gradients that comes from its heads
            plan |= dict.fromkeys((f"{attention}.q_norm", f"{attention}.k_norm"), "replicated_with_grad_allreduce")
        return plan

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan: dict[str, str]) -> None:
        vars(self)["base_model_tp_plan"] = plan  # transformers 5.16 adds an entry for tied embeddings


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
