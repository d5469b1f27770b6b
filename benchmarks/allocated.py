"""Bytes that a call allocates: at its peak, and still held after it for the backward pass.

On CUDA the caching allocator counts them, on a CPU PyTorch's profiler, which sees every block, those of compiled code
included. Neither counts what libraries allocate for themselves.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

_BLOCK = 512  # CUDA's caching allocator allocates multiples of this


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the bytes allocated during a call, minus those allocated before it; its result is included.

    On a CPU, memory that was allocated before the call and is freed in it still counts as held.
    """
    if device.type != "cuda":
        return max(itertools.accumulate(_blocks(run)[1]), default=0)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def bytes_saved(run: Callable[[], Any], device: torch.device) -> int:
    """Return the bytes that a forward pass allocated and still holds after it, without those of its result.

    A dispatch mode would not see the operations that a user runs (`kvshift.ops.dispatch.needs_traceable_ops`).
    """
    if device.type != "cuda":
        result, blocks = _blocks(run)
        return sum(blocks) - sum(_storages(result).values())
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device) - before
    return held - sum(-(-size // _BLOCK) * _BLOCK for size in _storages(result).values())


def _blocks(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return the result of a call on a CPU, and the bytes of each block that it allocated (negative: freed)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints log lines at every call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events: Any = profiler.profiler.kineto_results.events()
    blocks = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return result, [event.nbytes() for event in blocks]


def _storages(value: Any) -> dict[int, int]:
    """Return the bytes of each distinct storage, by address."""
    found = (tensor.untyped_storage() for tensor in tree_leaves(value) if isinstance(tensor, Tensor))
    return {storage._cdata: storage.nbytes() for storage in found}
