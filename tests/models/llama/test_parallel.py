"""Two processes with a part of the model each compute what one computes with the whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .tiny import tiny_model

ROOT = Path(__file__).parents[3]
PROCESSES = 2
# Sizes that two processes can share.
SIZES = {"num_key_value_heads": 2, "intermediate_size": 22, "vocab_size": 62}


def run(tmp_path: Path, *jobs: tuple[str, dict]) -> None:
    command = [sys.executable, "-m", "tests.models.llama.parallel_worker", str(tmp_path / "rendezvous")]
    for i, (kind, options) in enumerate(jobs):
        tiny_model(**SIZES, **options).save_pretrained(tmp_path / str(i))
        command.append(f"{kind}={tmp_path / str(i)}")
    workers = []
    for rank in range(PROCESSES):
        number = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "OMP_NUM_THREADS": "1"}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **number}, **pipe))
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * PROCESSES, "\n".join(outputs)


@pytest.mark.slow
def test_tensor_parallel(tmp_path):
    variants = [
        {},
        {"shift_targets": ["q", "k", "v"], "shift_window": 3, "qk_norm": True},
        {"shift_constraint": "gate", "tie_word_embeddings": True},
    ]
    run(tmp_path, *[("tensor", options) for options in variants])


@pytest.mark.slow
def test_data_parallel(tmp_path):
    run(tmp_path, ("data", {"shift_window": 3}), ("shards", {"shift_window": 3}))
