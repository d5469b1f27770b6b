"""Sequences whose raw keys and values lie in pages, and the layer that shifts them, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvshift import ShiftOptions
from kvshift.integrations.vllm_plugin import paged_shift
from kvshift.integrations.vllm_plugin.paged_shift import PagedShift

HEADS, SIZE, BLOCK, BLOCKS = 3, 5, 8, 64
NUMBERS = 2 * HEADS * SIZE


def make_paged_shift(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int = HEADS, **options: Any
) -> PagedShift:
    """Return the shift of a layer named "shift", with random coefficients, in a single process."""
    monkeypatch.setattr(paged_shift, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(paged_shift, "get_tensor_model_parallel_rank", lambda: 0)
    compilation = SimpleNamespace(static_forward_context={})
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype), compilation_config=compilation)
    monkeypatch.setattr(paged_shift, "get_current_vllm_config", lambda: config)
    layer = PagedShift(heads, SIZE, ShiftOptions(**options), "attention", "shift")
    for parameter in layer.parameters():
        parameter.uniform_(-0.3, 1)
    return layer


class Sequence:
    """A sequence: raw keys and values of all tokens, its blocks, and the number of tokens computed so far."""

    def __init__(
        self, dtype: torch.dtype, length: int, blocks: list[int], start: Sequence | None, numbers: int = NUMBERS
    ) -> None:
        self.raw = torch.randn(length, numbers).to(dtype)
        self.blocks, self.computed = blocks, 0
        if start is not None:  # a prefix-cache hit of whole blocks
            self.computed = min(start.computed, length - 1) // BLOCK * BLOCK
            self.raw[: self.computed] = start.raw[: self.computed]
            self.blocks = start.blocks[: self.computed // BLOCK] + blocks[self.computed // BLOCK :]


def batch_of(pieces: list[tuple[Sequence, int]]) -> Any:
    """Return vLLM's description of a batch, given each sequence and its number of tokens."""
    counts = torch.tensor([count for _, count in pieces])
    slots = [
        one.blocks[t // BLOCK] * BLOCK + t % BLOCK for one, n in pieces for t in range(one.computed, one.computed + n)
    ]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return SimpleNamespace(
        num_reqs=len(pieces),
        num_actual_tokens=len(slots),
        max_query_len=int(counts.max()),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        slot_mapping=torch.tensor(slots),
        seq_lens=torch.tensor([one.computed + count for one, count in pieces]).int(),
        block_table_tensor=torch.tensor([one.blocks for one, _ in pieces]).int(),
    )
