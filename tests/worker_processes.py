"""Processes of torch.distributed, each of which runs a test module or a function of one."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_workers(processes: int, arguments: Sequence[str], *, timeout: float = 300, **environment: str) -> list[str]:
    """Run `python ARGUMENTS` in every process, with its rank in the environment, and return their outputs.

    Args:
        timeout: Seconds after which all processes are killed.

    Raises:
        AssertionError: A process did not end with exit code 0.
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


def fork_workers(
    processes: int,
    work: Callable[..., None],
    *arguments: Any,
    timeout: float = 300,
    exit_code: int = 0,
    **environment: str,
) -> list[str]:
    """Run `work(*arguments)` in each process, like `run_workers`, but without the cost of imports in each process.

    The processes are forked from one that has only imported the module of the first `work` of this session.

    Args:
        work: A module-level function.
        exit_code: The exit code that every process must have; otherwise AssertionError is raised.
    """
    _FORKS.set_forkserver_preload([work.__module__])
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.txt") for rank in range(processes)]
        workers = []
        for rank, log in enumerate(logs):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            workers.append(_FORKS.Process(target=_work, args=(log, numbers | environment, work, arguments)))
        for worker in workers:
            worker.start()
        end = time.monotonic() + timeout
        running = workers
        while running and time.monotonic() < end and all(worker.exitcode in (None, exit_code) for worker in workers):
            multiprocessing.connection.wait([worker.sentinel for worker in running], end - time.monotonic())
            running = [worker for worker in workers if worker.exitcode is None]
        codes = [worker.exitcode for worker in workers]  # None: still running
        for worker in workers:
            worker.kill()
            worker.join()
        outputs = [log.read_text() if log.exists() else "" for log in logs]
    assert codes == [exit_code] * processes, "\n".join([f"exit codes {codes}", *outputs])
    return outputs


_FORKS = multiprocessing.get_context("forkserver")


def _work(log: Path, environment: dict[str, str], work: Callable[..., None], arguments: Sequence[Any]) -> None:
    import torch

    written = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(written, stream.fileno())
    os.environ.update(environment)
    torch.set_num_threads(1)
    work(*arguments)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # skip teardown: gloo's threads of several groups do not always end cleanly
