"""Detection of sequence parallelism, which divides every sequence among processes; layers with a shift reject it.

The first token of a part would need the keys and values of the previous token, which is in another process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

# Parts of the names of modules whose attention divides sequences, e.g. deepspeed.runtime.sequence_parallel.ulysses_sp.
_OF_MODULES = ("ulysses", "sequence_parallel", "ring_flash_attn")


def refuse_sharded_sequence() -> None:
    """Raise a ValueError that names the parallelism if one that divides sequences is active."""
    found = sequence_parallelism()
    if found is not None:
        raise ValueError(
            f"KV shift is not supported with {found}: each process gets a part of every sequence, and the first token "
            "of a part needs the keys and values of the token before, which is in another process. Keep sequences "
            "whole: use DDP, FSDP or DeepSpeed ZeRO (for KVShiftLlama also tensor parallelism, tp_plan='auto'), and "
            "gradient checkpointing where long sequences do not fit"
        )


def sequence_parallelism() -> str | None:
    """Return the name of the parallelism that divides sequences in this process, or None.

    It detects `context_parallel` of torch, the `ParallelismConfig` of accelerate (also used by Trainer), and attention
    functions registered with transformers, by the names of their modules: DeepSpeed's Ulysses and ring_flash_attn. A
    model cannot detect other ways to divide a sequence, for example in a custom training loop.
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


# Like `torch.compiler.assume_constant_result`, which would import torch._dynamo: seconds, even without compilation.
sequence_parallelism._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _torch_context_parallel() -> bool:
    """Return True if torch divides the inputs of attention, by replacing the function or by the dispatch of DTensor."""
    if str(F.scaled_dot_product_attention.__module__).startswith("torch.distributed."):
        return True
    package: Any = sys.modules.get("torch.distributed.tensor")
    handlers = () if package is None else package.DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers
