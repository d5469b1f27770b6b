"""Memory that is saved for the backward pass.

This is the memory that a forward pass allocated and that is still held after it has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kvshift_lab.benchmarks.peak import memory_blocks

_BLOCK = 512  # CUDA's caching allocator allocates multiples of this


def bytes_saved(run: Callable[[], Any], device: torch.device) -> int:
    """Return the bytes that a forward pass allocated and still holds after it, without those of its result.

    They are counted by the allocator on CUDA and by PyTorch's profiler on a CPU, in compiled code too. A dispatch mode
    would not see the operations that a user runs (`kvshift.ops.dispatch.needs_traceable_ops`).
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
    """Return the bytes of each distinct storage, by address."""
    found = (tensor.untyped_storage() for tensor in tree_leaves(value) if isinstance(tensor, Tensor))
    return {storage._cdata: storage.nbytes() for storage in found}
