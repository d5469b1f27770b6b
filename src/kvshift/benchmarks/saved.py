"""What is kept for the backward pass.

Hooks on saved tensors would be in the way of `kvshift.layers.recompute`, which is one itself. So what is counted is
memory that a forward pass took and that is still held when it has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kvshift.benchmarks.peak import memory_blocks

_BLOCK = 512  # CUDA's caching allocator hands out multiples of it


def bytes_saved(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes that are held after a forward pass and were not before it, what it returns left out.

    On CUDA that is what the allocator says, on a CPU what PyTorch's profiler sees, in compiled code too: a mode that
    sees operations would be given other ones than a user (`kvshift.ops.dispatch.needs_traceable_ops`).
    """
    if device.type != "cuda":
        result, blocks = memory_blocks(run)
        return sum(blocks) - sum(_storages(result).values())
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device) - before
    return held - sum(-(-size // _BLOCK) * _BLOCK for size in _storages(result).values())


def _storages(value: Any) -> dict[int, int]:
    """Bytes by address."""
    found = (tensor.untyped_storage() for tensor in tree_leaves(value) if isinstance(tensor, Tensor))
    return {storage._cdata: storage.nbytes() for storage in found}
