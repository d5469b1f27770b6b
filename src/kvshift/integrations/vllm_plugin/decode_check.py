"""A check at start-up that the decoding kernel gives the same results on this device as the other operations."""

from __future__ import annotations

import traceback
import warnings
from types import SimpleNamespace
from typing import Any

import torch

from kvshift.integrations.vllm_plugin.paged_shift import PagedShift, PagedShiftMetadata, Pages, UniformBatch

_VERDICTS: dict[Any, bool] = {}


def passes_decode_check(shift: PagedShift) -> bool:
    """Return True if `shift_uniform` may replace `shift_batch`; otherwise warn."""
    weights = shift.weights
    key = (weights.device, shift.dtype, shift.head_size, tuple(weights.shape))
    if key not in _VERDICTS:
        fault = decode_fault(shift)
        _VERDICTS[key] = fault is None
        if fault is not None:
            warnings.warn(
                f"the kernel for decoding gives other results on {weights.device}: {fault}. Shifts are computed by "
                "other operations, outside of CUDA graphs, which is slower. Please report this with the output of "
                "`python -m kvshift --test`.",
                RuntimeWarning,
                stacklevel=2,
            )
    return _VERDICTS[key]


@torch.inference_mode()
def decode_fault(shift: PagedShift) -> str | None:
    """Return how the results of `shift_uniform` differ from those of `shift_batch`, in one line; None if they do not.

    The batch consists of the first token of a sequence, a token within a block, a token whose previous block is a
    prefix hit that the next token fills, that next token, and padding.
    """
    weights, window = shift.weights, shift.weights.shape[1]
    device, numbers = weights.device, weights.shape[0] * shift.head_size
    pages = Pages(tokens=16, rows=window - 1, stride=15 + window, count=5 * (15 + window))
    chance = torch.Generator(device).manual_seed(0)
    kv, cache = (
        torch.randn(rows, numbers, generator=chance, device=device).to(shift.dtype) for rows in (5, pages.count)
    )
    batch: Any = SimpleNamespace(
        num_reqs=5,
        num_actual_tokens=5,
        max_query_len=1,
        query_start_loc=torch.arange(6, device=device, dtype=torch.int32),
        query_start_loc_cpu=torch.arange(6, dtype=torch.int32),
        slot_mapping=torch.tensor([16, 32 + 9, 64, 48 + 15, -1], device=device),
        seq_lens=torch.tensor([1, 10, 17, 16, 0], device=device, dtype=torch.int32),
        block_table_tensor=torch.tensor([[1, 0], [2, 0], [3, 4], [3, 0], [0, 0]], device=device, dtype=torch.int32),
    )
    uniform = UniformBatch.from_batch(batch, pages)
    assert uniform is not None
    expected, shifted, expected_cache = torch.zeros_like(kv), torch.zeros_like(kv), cache.clone()
    shift.shift_batch(kv, expected, expected_cache, PagedShiftMetadata.from_batch(batch, pages, window))
    try:
        shift.shift_uniform(kv, shifted, cache, uniform, pages)
        if not torch.equal(cache[pages.stride :], expected_cache[pages.stride :]):  # all but vLLM's null block
            return "it stores different keys and values"
        torch.testing.assert_close(shifted[:4], expected[:4])
    except Exception as error:  # compilers and drivers raise exceptions of many types
        return traceback.format_exception_only(error)[0].splitlines()[0]
    return None
