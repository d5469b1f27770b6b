"""Runs many jobs on the cores of a machine or on a cluster, with joblib."""

from __future__ import annotations

import math
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import joblib
import psutil
import torch
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from kvshift_lab.allocator import retain_freed_memory
from kvshift_lab.core.errors import InterruptedRunError, LabError, install_command
from kvshift_lab.study.entry import Cluster
from kvshift_lab.study.recipe import Job

_INTERRUPTED = "interrupted; finished runs are kept, and the same command resumes"
_IDLE_SECONDS = 10  # after which a worker whose parent process was killed ends


def sweep(
    jobs: Sequence[tuple[Job, Path]],
    *,
    workers: int | None = None,
    cluster: Cluster = "local",
    isolated: bool = False,
    done: Callable[[int, str | None], object] = lambda number, problem: None,
) -> list[str]:
    """Run jobs, each in its folder; a job that fails does not stop the others.

    Args:
        jobs: jobs and their folders; on a cluster, all machines must have access to the folders.
        workers: number of jobs at a time. None for the number of cores of this machine, or 1 if it has a GPU; on a
            cluster, for its number of GPUs, or of cores if it has none. Each worker sees one GPU, shared if necessary.
        cluster: "local" for processes on this machine, or this process if there is only one worker; "ray" for the Ray
            cluster that RAY_ADDRESS names, or one that is started here.
        isolated: run one job at a time on this machine, each in a new process as it would run alone, so that its
            peak memory is its own, and a job that is killed does not stop the others. `workers` and `cluster` are
            ignored.
        done: called with the number of each job that has ended, and its error or None.

    Returns:
        An error message for each job that failed.

    Raises:
        InterruptedRunError: if the process received a signal; finished runs are kept, and the rest can be resumed.
    """
    with ExitStack() as stack:
        problems = []
        for number, problem in _run_isolated(jobs, stack) if isolated else _run(jobs, workers, cluster, stack):
            done(number, problem)
            if problem is not None:
                problems.append(f"{jobs[number][0].arm}, seed {jobs[number][0].seed}: {problem}")
        return problems


def _run(
    jobs: Sequence[tuple[Job, Path]], workers: int | None, cluster: Cluster, stack: ExitStack
) -> Iterator[tuple[int, str | None]]:
    """Run jobs with joblib. Yield the number of each job that has ended, and its error or None."""
    cores, gpus = joblib.cpu_count(), int(torch.cuda.is_available())
    if cluster == "ray":
        cores, gpus = _enter_ray(stack)
    if workers is None:
        workers = gpus or cores
    # Cores are divided by `workers`, even if fewer jobs are left: the last bits depend on the number of threads.
    threads = max(1, cores // workers)
    workers = max(1, min(workers, len(jobs)))
    tasks = [joblib.delayed(_work)(number, job, out, threads) for number, (job, out) in enumerate(jobs)]
    batches = [tasks]
    if cluster == "ray":
        # With one worker joblib would run jobs in this process, so a pool of two gets one job at a time.
        batches = [[task] for task in tasks] if workers == 1 else batches
        pool = min(max(2, workers), cores)
        each = {"num_gpus": _gpu_share(pool, gpus)}
        stack.enter_context(joblib.parallel_config(backend="ray", n_jobs=pool, ray_remote_args=each))
    else:
        backend = "sequential" if workers == 1 else "loky"
        _protect_workers(stack)
        stack.enter_context(joblib.parallel_config(backend=backend, n_jobs=workers))
        if backend == "loky":
            stack.enter_context(_forward_signals(signal.SIGTERM))
    as_they_end = "list" if cluster == "ray" else "generator_unordered"  # Ray's backend has no generators
    parallel: Any = joblib.Parallel(batch_size=1, return_as=as_they_end)  # type: ignore[arg-type]  # declared str
    if cluster == "ray":
        stack.enter_context(parallel)  # one pool for all batches
    for batch in batches:
        yield from parallel(batch)


def _run_isolated(jobs: Sequence[tuple[Job, Path]], stack: ExitStack) -> Iterator[tuple[int, str | None]]:
    """Run each job in a new process, one after the other; see `_run`."""
    _protect_workers(stack)
    received = stack.enter_context(_forward_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    for number, (job, out) in enumerate(jobs):
        # On Ctrl-C, the worker must get only the signal forwarded here: at a second one, from the terminal, it would
        # end without writing the checkpoint that it writes at the first. Hence it has a process group of its own.
        with ProcessPoolExecutor(1, timeout=_IDLE_SECONDS, initializer=os.setpgrp) as pool:
            try:
                ended = pool.submit(_attempt, number, job, out).result()
            except TerminatedWorkerError:
                if received:
                    raise
                ended = number, "its process was killed (often because the system ran out of memory)"
        yield ended
        if received:
            raise InterruptedRunError(_INTERRUPTED, received[0])


def _work(number: int, job: Job, out: Path, threads: int) -> tuple[int, str | None]:
    """Run one job in this process with this number of threads. Return its number and its error as text, or None."""
    retain_freed_memory()  # training steps on a CPU take 0.82 of the time with this: docs/findings.md
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _attempt(number, job, out)
    finally:
        torch.set_num_threads(before)


def _attempt(number: int, job: Job, out: Path) -> tuple[int, str | None]:
    try:
        job.run(out)
    except InterruptedRunError:
        raise  # ends the other jobs, too
    except LabError as error:
        return number, str(error)
    except Exception as error:  # a bug, or a fault of the device: other jobs may succeed
        traceback.print_exc()
        return number, f"{type(error).__name__}: {error}"
    return number, None


def _protect_workers(stack: ExitStack) -> None:
    """Keep workers of joblib (`-m`, `-c`) from importing from the current folder, until `stack` is closed."""
    if "PYTHONSAFEPATH" not in os.environ:
        os.environ["PYTHONSAFEPATH"] = "1"
        stack.callback(os.environ.pop, "PYTHONSAFEPATH")


@contextmanager
def _forward_signals(*numbers: signal.Signals) -> Iterator[list[int]]:
    """Inside the block, pass signals on to the workers as SIGTERM, at which they save their state as on Ctrl-C.

    Signals that this process ignores, such as SIGHUP under nohup, stay ignored.

    Yields:
        The numbers of the signals received so far.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # Python handles signals only in the main thread
        yield received
        return

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                process.terminate()

    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heeded}
    try:
        yield received
    except Exception as error:
        if not received:
            raise
        raise InterruptedRunError(_INTERRUPTED, received[0]) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _gpu_share(workers: int, gpus: int) -> float:
    """Return the share of a GPU for each worker so that all fit: 1/n for a whole number n, or 0 without GPUs."""
    return 1 / math.ceil(workers / gpus) if gpus else 0


def _enter_ray(stack: ExitStack) -> tuple[int, int]:
    """Connect joblib to Ray until `stack` is closed. Return the numbers of cores and GPUs of the cluster."""
    try:
        import ray
        from ray.util.joblib import register_ray
    except ModuleNotFoundError as error:
        raise LabError(f"cluster is ray, which is not installed: {install_command('ray')}") from error
    register_ray()
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
    resources = ray.cluster_resources()
    return max(1, int(resources.get("CPU", 1))), int(resources.get("GPU", 0))
