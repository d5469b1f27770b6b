"""Two processes that get parts of sequences: every model with a shift refuses them by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_model_refuses(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.models.sharded_sequences_worker"]
    command += [str(tmp_path / "rendezvous"), str(tmp_path)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # accelerate requires it; nothing is opened there
    workers = []
    for rank in range(2):
        number = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", **address}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **number}, **pipe))
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    assert all(output.splitlines()[-1] == "passed" for output in outputs), "\n".join(outputs)
