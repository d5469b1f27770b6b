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

from kvshift_lab.allocator import retain_freed_memory
from kvshift_lab.core.errors import LabError, install_command
from kvshift_lab.run.callbacks import InterruptedRunError
from kvshift_lab.study.entry import Cluster
from kvshift_lab.study.recipe import Job


def sweep(
    jobs: Sequence[tuple[Job, Path]],
    *,
    workers: int | None = None,
    cluster: Cluster = "local",
    done: Callable[[int, str | None], object] = lambda number, problem: None,
) -> list[str]:
    """Run jobs, each in its folder; a job that fails does not stop the others.

    Args:
        jobs: jobs and their folders; on a cluster, all machines must have access to the folders.
        workers: number of jobs at a time. None for the number of cores of this machine, or 1 if it has a GPU; on a
            cluster, for its number of GPUs, or of cores if it has none. Each worker sees one GPU, shared if necessary.
        cluster: "local" for processes on this machine, or this process if there is only one worker; "ray" for the Ray
            cluster that RAY_ADDRESS names, or one that is started here.
        done: called with the number of each job that has ended, and its error or None.

    Returns:
        An error message for each job that failed.

    Raises:
        InterruptedRunError: if the process received a signal; finished runs are kept, and the rest can be resumed.
    """
    with ExitStack() as stack:
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
            if "PYTHONSAFEPATH" not in os.environ:  # else workers of joblib (`-m`, `-c`) import from the current folder
                os.environ["PYTHONSAFEPATH"] = "1"
                stack.callback(os.environ.pop, "PYTHONSAFEPATH")
            stack.enter_context(joblib.parallel_config(backend=backend, n_jobs=workers))
            if backend == "loky":
                stack.enter_context(_forward_sigterm())
        as_they_end = "list" if cluster == "ray" else "generator_unordered"  # Ray's backend has no generators
        parallel: Any = joblib.Parallel(batch_size=1, return_as=as_they_end)  # type: ignore[arg-type]  # declared str
        if cluster == "ray":
            stack.enter_context(parallel)  # one pool for all batches
        problems = []
        for number, problem in (ended for batch in batches for ended in parallel(batch)):
            done(number, problem)
            if problem is not None:
                problems.append(f"{jobs[number][0].arm}, seed {jobs[number][0].seed}: {problem}")
        return problems


def _work(number: int, job: Job, out: Path, threads: int) -> tuple[int, str | None]:
    """Run one job in this process. Return its number and its error as text, or None."""
    retain_freed_memory()  # training steps on a CPU take 0.82 of the time with this: docs/findings.md
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        job.run(out)
    except InterruptedRunError:
        raise  # ends the other jobs, too
    except LabError as error:
        return number, str(error)
    except Exception as error:  # a bug, or a fault of the device: other jobs may succeed
        traceback.print_exc()
        return number, f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(before)
    return number, None


@contextmanager
def _forward_sigterm() -> Iterator[None]:
    """Inside the block, pass SIGTERM on to the workers, which then save their state as on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = []

    def pass_on(number: int, frame: object) -> None:
        heard.append(number)
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                process.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    except Exception as error:
        if not heard or isinstance(error, InterruptedRunError):
            raise
        raise InterruptedRunError(
            "interrupted; finished runs are kept, and the same command resumes", heard[0]
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)


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
