"""Drafts by n-grams.

numba, which finds them, sets the number of threads of the process to its own. If that changes the number, every later
engine computes wrong results on a CPU, with vLLM's own Llama too. `conftest.py` sets numba's number of threads to one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from kvshift.integrations.vllm_plugin.paged_shift import PagedShiftMetadata, Pages
from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift.ops.boundaries import NO_ROW

from .engines import count, different, drawn, engine
from .test_controls import assert_caught

Checkpoint = Callable[[str], Path]
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture
def model(folder: Path) -> Any:
    return KVShiftLlamaForCausalLM.from_pretrained(folder).eval()


def test_drafts_by_n_grams(folder: Path, model: Any) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    prompts = [piece * 4 for piece in drawn(*range(2, 42), seed=5)]
    with engine(folder, speculative_config=drafts) as running:
        outputs = running.generate(prompts, tokens=40)
        drafted, rejected = running.drafted, running.rejected
    assert rejected > 100
    assert drafted - rejected > 0
    assert different(model, outputs) == []


@pytest.mark.parametrize(("name", "blocks"), [("llama", 32), ("mistral-sliding", 24), ("baichuan-m1", 30)])
def test_all_at_once(name: str, blocks: int, checkpoint: Checkpoint) -> None:
    """Chunks, hits, preemption and rejected drafts occur in one batch; no, all or some layers have a sliding window."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(name)).eval()
    start, *ends = drawn(70, *range(20, 60, 2), seed=8)
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "num_gpu_blocks_override": blocks}
    with engine(checkpoint(name), speculative_config=N_GRAMS, **options) as running:
        outputs = [output for _ in range(2) for output in running.generate([[*start, *end] for end in ends], tokens=32)]
        assert running.preemptions > 0
        assert running.rejected > 0
        assert max(running.chunks(output) for output in outputs if not output.num_cached_tokens) > 1
        assert running.free_blocks == blocks - 1
    assert max(count(outputs)) > 0
    assert different(model, outputs) == []


def one_row(metadata: PagedShiftMetadata, batch: Any, pages: Pages) -> PagedShiftMetadata:
    """A fault: drafts overwrite the row that is read after they are rejected."""
    first_of_page = (metadata.sources + pages.count) // pages.rows * pages.rows - pages.count
    sources = metadata.sources.where((metadata.sources >= 0) | (metadata.sources == NO_ROW), first_of_page)
    kept = metadata.stored_rows.where(metadata.stored_rows < 0, metadata.stored_rows // pages.rows * pages.rows)
    return replace(metadata, sources=sources, stored_rows=kept)


def test_a_state_not_restored_after_a_rejection_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(one_row, {"speculative_config": N_GRAMS}, folder, monkeypatch)
