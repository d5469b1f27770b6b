"""Parallelism that cuts sequences into parts, one for each process, and is therefore refused.

The first token of a part mixes its keys and values with those of the token before, which is in another process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

# In the names of modules whose attention cuts sequences, such as deepspeed.runtime.sequence_parallel.ulysses_sp.
_OF_MODULES = ("ulysses", "sequence_parallel", "ring_flash_attn")


def refuse_sharded_sequence() -> None:
    """Raise a ValueError that names the parallelism, where one that cuts sequences into parts is in force."""
    found = sequence_parallelism()
    if found is not None:
        raise ValueError(
            f"KV shift is not supported with {found}: each process gets a part of every sequence, and the first token "
            "of a part needs the keys and values of the token before, which is in another process. Keep sequences "
            "whole: use DDP, FSDP or DeepSpeed ZeRO (for KVShiftLlama also tensor parallelism, tp_plan='auto'), and "
            "gradient checkpointing where long sequences do not fit"
        )


def sequence_parallelism() -> str | None:
    """The parallelism of this process that cuts sequences into parts, or None.

    Known are torch's `context_parallel`, the `ParallelismConfig` of accelerate, which is Trainer's too, and functions
    of attention in the place of transformers', by the name of their module: DeepSpeed's Ulysses, ring_flash_attn. What
    else cuts a sequence, such as a training loop by itself, cannot be seen from within a model.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _torch_context_parallel():
        return "context parallelism (torch.distributed.tensor.experimental.context_parallel)"
    state: Any = sys.modules.get("accelerate.state")
    config = None if state is None else state.AcceleratorState._shared_state.get("parallelism_config")
    if config is not None and config.cp_enabled:
        return f"context parallelism (accelerate's ParallelismConfig, cp_size={config.cp_size})"
    if config is not None and getattr(config, "sp_enabled", False):  # accelerate 1.12 and later
        return f"Ulysses sequence parallelism (accelerate's ParallelismConfig, sp_size={config.sp_size})"
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    for function in () if modeling is None else modeling.ALL_ATTENTION_FUNCTIONS.values():
        module = str(getattr(function, "__module__", None))
        if any(word in module for word in _OF_MODULES):
            return f"sequence parallelism (attention by {module})"
    return None


# As by `torch.compiler.assume_constant_result`, which imports all of torch._dynamo: seconds, for who never compiles.
sequence_parallelism._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _torch_context_parallel() -> bool:
    """Whether torch cuts what attention gets: by a function in the place of its own, or by the dispatch of DTensor."""
    if str(F.scaled_dot_product_attention.__module__).startswith("torch.distributed."):
        return True
    package: Any = sys.modules.get("torch.distributed.tensor")
    handlers = () if package is None else package.DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers
