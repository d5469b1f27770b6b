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
    command = [sys.executable, str(SCRIPT), "capacity", "--layers", "3", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    theirs, ours = ([row for row in rows if (row["model"] == "KVShiftLlama") == is_ours] for is_ours in (False, True))
    assert len(theirs) == len(ours) == 4 * 3 * 2
    for row in theirs:
        assert row["bytes_per_token"] == 3 * 2 * 4 * 64 * 4  # layers, keys and values, heads, size, float32
        assert row["share"] == row["state_bytes_per_token"] == row["by_hand"] == 0
    for row in ours:
        assert row["state_bytes_per_token"] == row["by_hand"] == 3 * 2 * 4 * 64 * 4 / row["block_size"]
        # A row beside those of the tokens in each block, and nothing set aside; whole blocks of the pool are counted.
        assert row["share"] == pytest.approx(1 / (row["block_size"] + 1), abs=1e-3)
        if row["block_size"] >= 64:
            assert row["share"] < 0.03
