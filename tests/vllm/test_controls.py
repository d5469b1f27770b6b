"""The comparison of `test_settings.py` detects each of several deliberate faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvshift.integrations.vllm_plugin.paged_shift import PagedShiftMetadata, Pages
from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift.ops.boundaries import NO_ROW

from .engines import Engine, different, drawn, engine

Checkpoint = Callable[[str], Path]
WINDOW = 2
metadata_of = PagedShiftMetadata.from_batch
NAMES = ("num_reqs", "max_query_len", "query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor")


def read_before_write(metadata: PagedShiftMetadata, batch: Any, pages: Pages) -> PagedShiftMetadata:
    """All rows are read from the cache, before the rows of a block that this batch fills are written."""
    elsewhere = SimpleNamespace(**{name: getattr(batch, name) for name in NAMES})
    elsewhere.slot_mapping = batch.slot_mapping + 2**40  # no token of the batch is found in its slot
    return replace(metadata, sources=metadata_of(elsewhere, pages, WINDOW).sources)


def read_after_write(metadata: PagedShiftMetadata, batch: Any, pages: Pages) -> PagedShiftMetadata:
    """Rows are read after writing: a piece that wraps around the ring has overwritten the rows that it continues."""
    written = metadata.sources[..., None] + pages.count == metadata.stored_rows
    sources = torch.where(written.any(-1), written.int().argmax(-1), metadata.sources)
    return replace(metadata, sources=sources.int())


def no_rows_for_hits(metadata: PagedShiftMetadata, batch: Any, pages: Pages) -> PagedShiftMetadata:
    """A piece that begins a block does not find the rows of the block before."""
    begins = batch.query_start_loc[: batch.num_reqs + 1]
    at_block = (batch.seq_lens[: batch.num_reqs] - begins.diff()) % pages.tokens == 0
    sources = metadata.sources.clone()
    sources[0, begins[:-1][at_block], 1:] = NO_ROW
    return replace(metadata, sources=sources)


def nothing_kept(metadata: PagedShiftMetadata, batch: Any, pages: Pages) -> PagedShiftMetadata:
    """Every piece begins as if it were the first of its sequence."""
    return replace(metadata, sources=metadata.sources.where(metadata.sources >= 0, NO_ROW))


FAULTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "read before write": (read_before_write, {"max_num_batched_tokens": 1024}),
    "read after write": (read_after_write, {"long_prefill_token_threshold": 7}),
    "a prefix hit without raw keys and values": (no_rows_for_hits, {"max_num_batched_tokens": 1024}),
    "nothing kept": (nothing_kept, {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_caught(name: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, options = FAULTS[name]
    assert_caught(fault, options, checkpoint("llama"), monkeypatch)


def assert_caught(fault: Any, options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that answers to the same prompts are right without the fault and wrong with it."""
    model: Any = KVShiftLlamaForCausalLM.from_pretrained(folder).eval()
    with engine(folder, **options) as running:
        right = answers(running)
        stock = PagedShiftMetadata.from_batch

        def faulty(batch, pages, window):
            return fault(stock(batch, pages, window), batch, pages)

        monkeypatch.setattr(PagedShiftMetadata, "from_batch", faulty)
        running.llm.reset_prefix_cache()
        wrong = answers(running)
    assert different(model, right) == []
    assert len(different(model, wrong)) > 0


def answers(running: Engine) -> list[Any]:
    """Generate in one batch from repetitive prompts with a common start; some hit blocks that others compute."""
    start, *ends = drawn(64, *[3] * 12, seed=15)
    return running.generate([[*start, *end, *end, *end] for end in ends], tokens=24)
