"""Processes of torch.distributed, each of which runs a module of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_workers(processes: int, arguments: Sequence[str], *, timeout: float = 300, **environment: str) -> list[str]:
    """The output of each of `python ARGUMENTS`, which get their rank by the environment and must succeed.

    Args:
        timeout: in seconds, after which all are killed.
    """
    workers = []
    for rank in range(processes):
        number = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **number, **environment}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers.append(subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, **pipe))
    try:
        outputs = [worker.communicate(timeout=timeout)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * processes, "\n".join(outputs)
    return outputs
