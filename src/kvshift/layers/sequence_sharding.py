"""Detection of sequence parallelism, which divides every sequence among processes; layers with a shift reject it.

The first token of a part would need the keys and values of the previous token, which is in another process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

# Names under which transformers registers functions of its own. For "eager" it has none: each model uses its own.
_OF_TRANSFORMERS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# Where transformers looks up the function behind "flash_attention_2" and its like, at each call.
_FLASH = ("transformers.integrations.flash_attention", "transformers.modeling_flash_attention_utils")


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

    It detects `context_parallel` of torch, the `ParallelismConfig` of accelerate (also used by Trainer), an active
    device mesh with a dimension "cp" or "sp", and attention that was replaced: an attention function of transformers,
    as by DeepSpeed's Ulysses, ring_flash_attn and verl, or torch's scaled_dot_product_attention. Functions registered
    under new names are taken to keep sequences whole. A model cannot detect other ways to divide a sequence, for
    example in a custom training loop.
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
    meshes: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    for mesh in getattr(meshes, "mesh_stack", ()):
        sizes: dict[str, int] = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        if max(sizes.get("cp", 1), sizes.get("sp", 1)) > 1:
            return f"context parallelism (the active device mesh, {sizes})"
    replaced = _replaced_attention()
    if replaced is not None:
        return (
            f"sequence parallelism ({replaced}; if that keeps sequences whole, register it with "
            "transformers.AttentionInterface under a new name instead, such as 'sdpa_mine')"
        )
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


def _replaced_attention() -> str | None:
    """Describe a function of torch or transformers that computes attention and was replaced, or return None."""
    if F.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention:  # type: ignore[attr-defined]
        return f"scaled_dot_product_attention was replaced by {_name(F.scaled_dot_product_attention)}"
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    registered: Any = {} if modeling is None else modeling.ALL_ATTENTION_FUNCTIONS
    for name, function in registered.items():
        hidden = registered._global_mapping.get(name, function)  # behind registered[name] = function
        if function is not hidden or (name in _OF_TRANSFORMERS and not _is_of_transformers(function)):
            return f"attention {name!r} was replaced by {_name(function)}"
    for module in _FLASH:
        function = getattr(sys.modules.get(module), "_flash_attention_forward", None)
        if function is not None and not _is_of_transformers(function):
            return f"{module}._flash_attention_forward was replaced by {_name(function)}"
    return None


def _is_of_transformers(function: Any) -> bool:
    """Return True for a function defined in transformers. (`functools.wraps` copies its name, but not its globals.)"""
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith("transformers.")


def _name(function: Any) -> str:
    defined_in = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return f"{defined_in}.{getattr(function, '__qualname__', type(function).__qualname__)}"
