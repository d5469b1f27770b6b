"""A sweep over a real Ray cluster of this machine, with two cores and no dashboard."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.core.errors import InterruptedRunError, LabError
from kvshift_lab.study.sweep import _gpu_share, sweep

from .cases import Counting, runs

ray = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@dataclass(frozen=True, kw_only=True)
class Meeting(Counting):
    """A job that ends once the other jobs of its sweep have begun, too, and records which GPUs it sees."""

    others: int

    def run(self, out: Path) -> None:
        (out.parent / f"here-{self.seed}").touch()
        deadline = time.monotonic() + 120
        while len([*out.parent.glob("here-*")]) <= self.others:
            if time.monotonic() > deadline:
                raise LabError("nobody came")
            time.sleep(0.02)
        super().run(out)
        (out / "gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))


@pytest.fixture(scope="module", autouse=True)
def child_environment() -> Iterator[None]:
    """Keep Ray from using the user's folders and tokens and from reporting; let its workers import these jobs."""
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        patch.setenv("RAY_TMPDIR", folder)  # short, as the paths of its sockets must be
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def cluster(child_environment: None) -> Iterator[None]:
    """A cluster with one GPU, by name only: Ray queries no driver, and the jobs use none."""
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def found(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def test_jobs_run_at_a_time_in_processes_of_their_own(cluster: None, tmp_path: Path) -> None:
    folders = [tmp_path / str(seed) for seed in (0, 1)]
    jobs = [(Meeting(label="a", seed=seed, others=1), folder) for seed, folder in enumerate(folders)]
    told: list[tuple[int, str | None]] = []
    assert sweep(jobs, workers=2, cluster="ray", done=lambda number, problem: told.append((number, problem))) == []
    assert sorted(told) == [(0, None), (1, None)]
    assert [runs(folder) for folder in folders] == [1, 1]
    processes = {found(folder)["process"] for folder in folders}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert {found(folder)["threads"] for folder in folders} == {1}  # two cores for two workers
    assert all(found(folder)["main"] for folder in folders)  # signals arrive in the main thread
    assert [(folder / "gpus").read_text() for folder in folders] == ["0", "0"]  # they share it
    assert ray.is_initialized()  # a cluster that existed before is not shut down


def test_with_one_gpu_there_is_one_job_at_a_time_and_one_that_fails_stops_no_other(
    cluster: None, tmp_path: Path
) -> None:
    jobs = [(Counting(label=ends, seed=3, ends=ends), tmp_path / ends) for ends in ("badly", "well")]
    told: list[int] = []
    problems = sweep(jobs, cluster="ray", done=lambda number, problem: told.append(number))
    assert problems == ["badly, seed 3: the beads are lost"]
    assert told == [0, 1]
    assert runs(tmp_path / "well") == 1
    assert found(tmp_path / "well")["process"] != os.getpid()  # it ran on the cluster
    assert found(tmp_path / "well")["threads"] == 2


@pytest.mark.parametrize(("workers", "gpus", "share"), [(2, 0, 0), (2, 1, 0.5), (3, 2, 0.5), (4, 4, 1), (2, 8, 1)])
def test_all_workers_fit_on_the_gpus(workers: int, gpus: int, share: float) -> None:
    assert _gpu_share(workers, gpus) == share


def test_an_interruption_reaches_the_caller(cluster: None, tmp_path: Path) -> None:
    jobs = [(Counting(label="a", seed=seed, ends="interrupted"), tmp_path / str(seed)) for seed in (0, 1)]
    with pytest.raises(InterruptedRunError, match="told to end"):
        sweep(jobs, cluster="ray", workers=2)


def test_a_cluster_that_was_not_there_is_started_and_ended(tmp_path: Path) -> None:
    if ray.is_initialized():
        ray.shutdown()
    assert sweep([(Counting(label="a"), tmp_path)], cluster="ray") == []
    assert runs(tmp_path) == 1
    assert found(tmp_path)["process"] != os.getpid()
    assert not ray.is_initialized()
