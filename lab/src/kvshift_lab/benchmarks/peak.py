"""Peak memory of a call."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the bytes allocated during a call, minus those allocated before it; its result is included.

    On CUDA the caching allocator counts them. On a CPU all blocks that PyTorch allocates and frees are added up, those
    of compiled code included; memory that was allocated before the call and is freed in it still counts as held.
    Neither includes memory that libraries allocate for themselves.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return max(itertools.accumulate(memory_blocks(run)[1]), default=0)


def memory_blocks(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return the result of a call on a CPU, and the bytes of each block that it allocated (negative: freed)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints log lines at every call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events: Any = profiler.profiler.kineto_results.events()
    blocks = [event for event in events if event.name() == "[memory]"]
    blocks.sort(key=lambda event: event.start_ns())
    return result, [event.nbytes() for event in blocks]
