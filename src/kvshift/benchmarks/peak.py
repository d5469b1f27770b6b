"""The most memory that a call holds at once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that were held at the peak of a call beyond those held before it, what it returns included.

    On CUDA the caching allocator says so. On a CPU every block that PyTorch takes and gives back is added up, whoever
    asks for it, compiled code too; what was there before and is given back is still counted as held. Memory that
    libraries take for themselves is in neither.
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
    """What a call on a CPU returns, and the bytes of each block that was taken (or, below 0, given back) until then."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints lines of its own at every call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events: Any = profiler.profiler.kineto_results.events()
    blocks = [event for event in events if event.name() == "[memory]"]
    blocks.sort(key=lambda event: event.start_ns())
    return result, [event.nbytes() for event in blocks]
