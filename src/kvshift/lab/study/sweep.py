"""Many jobs over the cores of a machine, or over a cluster, through joblib."""

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

from kvshift.lab.allocator import keep_memory
from kvshift.lab.core.errors import LabError, install_command
from kvshift.lab.study.entry import Cluster
from kvshift.lab.study.recipe import Job
from kvshift.lab.training.callbacks import InterruptedRunError


def sweep(
    jobs: Sequence[tuple[Job, Path]],
    *,
    workers: int | None = None,
    cluster: Cluster = "local",
    done: Callable[[int, str | None], object] = lambda number, problem: None,
) -> list[str]:
    """Run jobs, each in its folder; one that fails does not stop the others.

    Args:
        jobs: with the folder of each; on a cluster, one that all its machines see.
        workers: jobs at a time. None: as many as this machine has cores, or one where it has a GPU; on a cluster,
            as many as it has GPUs, or else cores. Each sees one GPU; where there are more workers, they share.
        cluster: "local": processes of this machine; one worker works in this very process. "ray": the Ray cluster
            that RAY_ADDRESS names, or else one that is started here.
        done: is told the number of each job that ends, and what was wrong with it, if anything.

    Returns:
        What was wrong, a line for each job that failed.

    Raises:
        InterruptedRunError: a signal came; what was finished is kept, and the rest can be continued.
    """
    with ExitStack() as stack:
        cores, gpus = joblib.cpu_count(), int(torch.cuda.is_available())
        if cluster == "ray":
            cores, gpus = _enter_ray(stack)
        if workers is None:
            workers = gpus or cores
        # Of all workers, also where fewer jobs are left than there are: bits depend on the number of threads.
        threads = max(1, cores // workers)
        workers = max(1, min(workers, len(jobs)))
        tasks = [joblib.delayed(_work)(number, job, out, threads) for number, (job, out) in enumerate(jobs)]
        batches = [tasks]
        if cluster == "ray":
            # For one worker joblib would leave the cluster and work here: a pool of two takes one job at a time.
            batches = [[task] for task in tasks] if workers == 1 else batches
            pool = min(max(2, workers), cores)
            each = {"num_gpus": _gpu_share(pool, gpus)}
            stack.enter_context(joblib.parallel_config(backend="ray", n_jobs=pool, ray_remote_args=each))
        else:
            backend = "sequential" if workers == 1 else "loky"
            if "PYTHONSAFEPATH" not in os.environ:  # joblib's `-m` and `-c` import from the current directory
                os.environ["PYTHONSAFEPATH"] = "1"
                stack.callback(os.environ.pop, "PYTHONSAFEPATH")
            stack.enter_context(joblib.parallel_config(backend=backend, n_jobs=workers))
            if backend == "loky":
                stack.enter_context(_ending_together())
        as_they_end = "list" if cluster == "ray" else "generator_unordered"  # Ray's backend gives no generator
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
    """Run one job in this process; errors that the user can fix come back as text."""
    keep_memory()  # a training step on a CPU takes 0.82 of its time so: docs/findings.md
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        job.run(out)
    except InterruptedRunError:
        raise  # the others are told to end, too
    except LabError as error:
        return number, str(error)
    except Exception as error:  # a fault of ours, or of the device: the other jobs may be well
        traceback.print_exc()
        return number, f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(before)
    return number, None


@contextmanager
def _ending_together() -> Iterator[None]:
    """SIGTERM, which comes to this process alone, reaches its workers too: they keep what they have, as on Ctrl-C."""
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
            "interrupted; what is finished is kept, and the same command resumes", heard[0]
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _gpu_share(workers: int, gpus: int) -> float:
    """Of a GPU for each worker, such that all fit: one, or a part that fits into one a whole number of times."""
    return 1 / math.ceil(workers / gpus) if gpus else 0


def _enter_ray(stack: ExitStack) -> tuple[int, int]:
    """Connect joblib to Ray until `stack` is closed; returns the cores and the GPUs of the cluster."""
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
