"""Time the shift of a decoding step in vLLM by itself, on a GPU: microseconds per layer.

    PYTHONPATH=src:lab/src:. python benchmarks/paged_shift.py FILE

It needs vLLM, pytest and a CUDA device. For batches with one token per sequence it times `LAYERS` layers one after the
other, each with its own memory:

graph      one launch per layer, in a CUDA graph: what a step of vLLM waits for
launches   the same launches outside a graph
batch      the path for all other batches, which cannot be captured in a graph
copy       one copy of the keys and values per layer, in a CUDA graph: a lower bound for any kernel

Times are medians over rounds, with quartiles, of the wall clock from an idle device to an idle device. A line of JSON
for each is appended to FILE.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.integrations.vllm_plugin.paged_shift import PagedShiftMetadata, Pages, UniformBatch
from kvshift_lab.core.environment import environment
from kvshift_lab.core.timing import quartiles
from tests.vllm import paged_sequences

LAYERS, KV_HEADS, HEAD_SIZE, PAGE, DTYPE = 32, 8, 128, 16, torch.bfloat16
SEQUENCES = (1, 8, 64, 256)
LENGTH = 1000  # current length of each sequence
ROUNDS = 50
DEVICE = torch.device("cuda")


def decoding_batch(sequences: int) -> Any:
    """Return a batch with one token per sequence, as vLLM describes it; sequences share no blocks."""
    blocks = -(-LENGTH // PAGE)
    table = torch.arange(1, 1 + sequences * blocks).view(sequences, blocks)
    slots = table[:, -1] * PAGE + (LENGTH - 1) % PAGE
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=sequences,
        num_actual_tokens=sequences,
        max_query_len=1,
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        slot_mapping=slots.to(DEVICE),
        seq_lens=torch.full((sequences,), LENGTH, dtype=torch.int32, device=DEVICE),
        block_table_tensor=table.int().to(DEVICE),
    )


def capture_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays the step as a CUDA graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def microseconds(step: Callable[[], None]) -> dict[str, float]:
    """Return the median and quartiles of the microseconds per layer."""
    times = []
    for number in range(ROUNDS + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= 5:
            times.append((time.perf_counter() - start) / LAYERS * 1e6)
    found = quartiles(times)
    return {"microseconds": found.median, "low": found.low, "high": found.high}


@torch.inference_mode()
def measure(sequences: int) -> dict[str, dict[str, float]]:
    """Return the times of all ways by name, for a batch of `sequences` sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_sequences, "SIZE", HEAD_SIZE)
        shift = paged_sequences.make_paged_shift(patch, DTYPE, KV_HEADS).to(DEVICE)
    batch, numbers = decoding_batch(sequences), 2 * KV_HEADS * HEAD_SIZE
    number_of_pages = int(batch.block_table_tensor.max()) + 1
    pages = Pages(tokens=PAGE, rows=1, stride=PAGE + 1, count=number_of_pages * (PAGE + 1))
    uniform = UniformBatch.from_batch(batch, pages)
    metadata = PagedShiftMetadata.from_batch(batch, pages, window=2)
    assert uniform is not None
    assert shift.supports_uniform

    def new(rows: int) -> list[Tensor]:
        return [torch.randn(rows, numbers, device=DEVICE).to(DTYPE) for _ in range(LAYERS)]

    kv, shifted, other = new(sequences), new(sequences), new(sequences)
    # A step reads and writes only the last page of each sequence, so one cache serves all layers.
    cache = torch.randn(pages.count, numbers, device=DEVICE, dtype=DTYPE)

    def launches() -> None:
        for x, y in zip(kv, shifted, strict=True):
            shift.shift_uniform(x, y, cache, uniform, pages)

    def by_batch() -> None:
        for x, y in zip(kv, other, strict=True):
            shift.shift_batch(x, y, cache, metadata)

    def copies() -> None:
        for x, y in zip(kv, other, strict=True):
            y.copy_(x)

    shift.shift_uniform(kv[0], shifted[0], cache.clone(), uniform, pages)
    shift.shift_batch(kv[0], other[0], cache.clone(), metadata)
    torch.testing.assert_close(shifted[0], other[0])
    ways = {"graph": capture_graph(launches), "launches": launches, "batch": by_batch, "copy": capture_graph(copies)}
    return {name: microseconds(step) for name, step in ways.items()}


def main(file: Path) -> None:
    about = environment(DEVICE, processes=1)
    del about["command"]  # it contains FILE, a path of this machine
    settings = {"layers": LAYERS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "page": PAGE, "dtype": str(DTYPE)}
    with file.open("a") as lines:
        for sequences in SEQUENCES:
            for name, found in measure(sequences).items():
                lines.write(json.dumps({"sequences": sequences, "way": name, **found, **settings, **about}) + "\n")
                lines.flush()
                print(f"{sequences:4} sequences  {name:9} {found['microseconds']:8.2f} us per layer", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
