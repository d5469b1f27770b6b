"""benchmarks/serving.py: the share of vLLM's pool that raw keys and values take, counted by vLLM."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from . import engines  # noqa: F401  # prevents imports of vLLM in further processes

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving.py"


@pytest.fixture
def process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the changes that the script makes to vLLM, since it expects a process of its own."""
    name = "get_supported_kernel_block_sizes"
    monkeypatch.setattr(CPUAttentionBackend, name, CPUAttentionBackend.__dict__[name])
    yield
    cleanup_dist_env_and_memory()


@pytest.mark.usefixtures("process_as_it_was")
def test_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "capacity.jsonl"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "capacity", "--layers", "4", "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 * 4 * 3 * 2
    assert len({row["model"] for row in rows}) == 3
    for row in rows:
        assert row["state_bytes_per_token"] == pytest.approx(row["by_hand"])
        # Each page has one row behind those of its tokens, and nothing else is reserved. The pool has whole blocks.
        fits = row["state_bytes_per_token"] / row["bytes_per_token"]
        assert row["share"] == pytest.approx(fits, abs=1e-3)
        if row["block_size"] >= 64:
            assert row["share"] < 0.02
        if row["model"] == "KVShiftLlama":
            row_bytes = 2 * 4 * 64 * 4  # keys and values, heads, head size, float32
            assert row["by_hand"] == 4 * row_bytes / row["block_size"]  # 4 layers
