"""What people copy runs as it stands: the examples, and the blocks of the tutorial."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_tiny_gpt_learns_induction_in_one_layer():
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "tiny_gpt.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    *training, answer = run.stdout.splitlines()
    accuracy = {
        (targets, int(step)): float(value)
        for targets, step, value in (
            re.fullmatch(r"shift (\(.*\)): step (\d+), .* accuracy on repeats ([\d.]+)", line).groups()
            for line in training
        )
    }
    assert accuracy["('k', 'v')", 100] >= 0.99
    assert accuracy["()", 100] < 0.5
    assert answer == "11 5 42 7 30 11 continues with 5 42 7 30 11 5 42 7 30"


def test_every_block_of_the_tutorial_runs():
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    namespace = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == text.count("```") // 2
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, "docs/tutorial.md", "exec"), namespace)
    with pytest.raises(NotImplementedError, match="use_cache=False"):  # whatever this transformers calls the cache
        namespace["qwen"](namespace["tokens"], use_cache=True)
