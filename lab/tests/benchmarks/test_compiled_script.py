"""benchmarks/compiled.py counts the bytes that are computed by hand here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from kvshift.ops.triton.call import triton_unsupported_reason

from .scripts import FOLDER

B, T, H, G, D = 2, 64, 4, 2, 16
FIELDS = {
    "vocab_size": 8,
    "hidden_size": H * D,
    "intermediate_size": 96,
    "num_attention_heads": H,
    "num_key_value_heads": G,
}
# This runs in a separate process, because the script patches PyTorch to describe a GPU that is not there.
PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(FOLDER)!r})
import compiled
names = compiled.WITHOUT, compiled.PLAIN, compiled.KEPT, compiled.AUTO
print(json.dumps([compiled.layer(name, {FIELDS}, {B}, {T}) for name in names]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="it reads Inductor's plan as torch 2.13 makes it")
def test_what_is_planned_is_what_must_be_moved_and_kept():
    refusal = triton_unsupported_reason(torch.empty(0), 2)
    if refusal is not None:
        pytest.skip(refusal)
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    without, plain, kept, auto = json.loads(run.stdout)
    k = B * T * G * D * 2  # bytes; v has as many
    tables = 2 * T * D * 2  # counted whole, although the kernels read half
    coefficients = 2 * G * 2 * 4

    def launches(row: dict, way: str, kernel: str) -> list[int]:
        planned = row["kernels_of_one_layer"][way]
        return [one["bytes"] for one in planned if one["kernel"] == f"torch.ops.kvshift.{kernel}.default"]

    for row in (kept, auto):
        assert launches(row, "forward", "shift") == [4 * k + tables + coefficients], "k and v in and out"
        assert launches(row, "backward", "shift_backward") == [6 * k + tables + 2 * coefficients], "and gradients"
    assert launches(kept, "backward", "shift") == []
    assert launches(auto, "backward", "shift") == [4 * k + tables + coefficients]
    assert kept["saved_bytes"] - without["saved_bytes"] == 2 * k
    assert auto["saved_bytes"] == without["saved_bytes"]
    assert plain["saved_bytes"] - without["saved_bytes"] > 2 * k
    moved = [row["forward_bytes"] + row["backward_bytes"] for row in (without, auto, plain)]
    assert moved == sorted(moved), "which is why training takes the kernels"
