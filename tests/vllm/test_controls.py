"""Faults on purpose, one at a time: the comparison of `test_settings.py` catches each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshift.integrations.vllm_plugin.paged_shift import PagedShiftMetadata
from kvshift.models.llama import KVShiftLlamaForCausalLM

from .engines import Engine, different, drawn, engine

Checkpoint = Callable[[str], Path]


def read_before_write(metadata: PagedShiftMetadata) -> PagedShiftMetadata:
    """All rows of state are read first: those of a block that this batch fills are not there yet."""
    return replace(metadata, same_block=torch.ones_like(metadata.same_block))


def read_after_write(metadata: PagedShiftMetadata) -> PagedShiftMetadata:
    """All are read last: a piece that goes round the ring has written over what it continues from."""
    return replace(metadata, same_block=torch.zeros_like(metadata.same_block))


def no_rows_for_hits(metadata: PagedShiftMetadata) -> PagedShiftMetadata:
    """What stands in a block before the one in which a piece begins is not found."""
    return replace(metadata, began=metadata.began & metadata.same_block)


def nothing_kept(metadata: PagedShiftMetadata) -> PagedShiftMetadata:
    """Every piece begins as if it were the first."""
    return replace(metadata, began=torch.zeros_like(metadata.began))


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
    """The same prompts, first without the fault and then with it."""
    model: Any = KVShiftLlamaForCausalLM.from_pretrained(folder).eval()
    with engine(folder, **options) as running:
        right = answers(running)
        of = PagedShiftMetadata.of
        monkeypatch.setattr(PagedShiftMetadata, "of", lambda *args: fault(of(*args)))
        running.llm.reset_prefix_cache()
        wrong = answers(running)
    assert different(model, right) == []
    assert len(different(model, wrong)) > 0


def answers(running: Engine) -> list[Any]:
    """Of prompts that share a start and repeat themselves, in one batch: some hit what others are computing."""
    start, *ends = drawn(64, *[3] * 12, seed=15)
    return running.generate([[*start, *end, *end, *end] for end in ends], tokens=24)
