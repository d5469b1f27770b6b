"""benchmarks/serving.py: what raw keys and values take of vLLM's pool, counted by vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving.py"


def test_capacity(tmp_path: Path) -> None:
    """In a process of its own: this one may have an engine already."""
    out = tmp_path / "capacity.jsonl"
    command = [sys.executable, str(SCRIPT), "capacity", "--layers", "4", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 * 4 * 3 * 2
    assert len({row["model"] for row in rows}) == 3
    for row in rows:
        assert row["state_bytes_per_token"] == pytest.approx(row["by_hand"])
        # A row behind those of the tokens in each page, and nothing set aside; whole blocks of the pool are counted.
        fits = row["state_bytes_per_token"] / row["bytes_per_token"]
        assert row["share"] == pytest.approx(fits, abs=1e-3)
        if row["block_size"] >= 64:
            assert row["share"] < 0.02
        if row["model"] == "KVShiftLlama":
            row_bytes = 2 * 4 * 64 * 4  # keys and values, heads, their size, float32
            assert row["by_hand"] == 4 * row_bytes / row["block_size"]  # 4 layers
