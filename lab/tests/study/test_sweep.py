"""A sweep runs each of its jobs once, and reports which failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from joblib.externals.loky import get_reusable_executor

from kvshift_lab.core.errors import InterruptedRunError
from kvshift_lab.study.sweep import sweep

from .cases import Counting, runs


def results(folders: list[Path]) -> list[dict]:
    return [json.loads((folder / "result.json").read_text()) for folder in folders]


def test_one_worker_works_in_this_process(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    told: list[tuple[int, str | None]] = []
    threads = torch.get_num_threads()
    problems = sweep(
        [(Counting(label="a", seed=number), folder) for number, folder in enumerate(folders)],
        workers=1,
        done=lambda number, problem: told.append((number, problem)),
    )
    assert problems == []
    assert told == [(0, None), (1, None), (2, None)]
    assert [runs(folder) for folder in folders] == [1, 1, 1]
    assert {found["process"] for found in results(folders)} == {os.getpid()}
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_two_workers_are_processes_that_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joblib.cpu_count", lambda: 6)
    folders = [tmp_path / str(number) for number in range(4)]
    told: list[int] = []
    jobs = [(Counting(label="a", seed=number), folder) for number, folder in enumerate(folders)]
    problems = sweep(jobs, workers=2, done=lambda number, problem: told.append(number))
    assert problems == []
    assert sorted(told) == [0, 1, 2, 3]
    found = results(folders)
    assert os.getpid() not in {result["process"] for result in found}
    assert {result["threads"] for result in found} == {3}
    assert all(result["main"] for result in found)  # signals arrive in the main thread
    assert max(result["new_pages"] for result in found) < 1000  # of 16,384: the C library keeps freed memory


@pytest.mark.slow
def test_workers_execute_no_files_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get_reusable_executor().shutdown(wait=True)  # end the workers of another test
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in ("joblib", "numpy", "runpy", "torch"):
        (hostile / f"{name}.py").write_text(f"open({str(hostile / 'executed')!r}, 'w'); raise SystemExit('executed')\n")
    monkeypatch.chdir(hostile)
    jobs = [(Counting(label="a", seed=number), tmp_path / str(number)) for number in range(2)]
    assert sweep(jobs, workers=2) == []
    assert not (hostile / "executed").exists()
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_job_that_is_left_alone_has_the_threads_that_it_had_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, a run that was killed would not resume with the same bits."""
    monkeypatch.setattr("joblib.cpu_count", lambda: 6)
    assert sweep([(Counting(label="a"), tmp_path)], workers=3) == []
    assert results([tmp_path])[0]["threads"] == 2


def test_a_job_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    told: list[tuple[int, str | None]] = []
    jobs = [(Counting(label=ends, seed=3, ends=ends), tmp_path / ends) for ends in ("badly", "well")]
    problems = sweep(jobs, workers=1, done=lambda number, problem: told.append((number, problem)))
    assert problems == ["badly, seed 3: the beads are lost"]
    assert told == [(0, "the beads are lost"), (1, None)]
    assert runs(tmp_path / "well") == 1


def test_a_fault_of_ours_does_not_stop_the_others_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [(Counting(label=ends, ends=ends), tmp_path / ends) for ends in ("faulty", "well")]
    assert sweep(jobs, workers=1) == ["faulty, seed 0: ZeroDivisionError: division by zero"]
    assert runs(tmp_path / "well") == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interruption_stops_the_sweep(tmp_path: Path) -> None:
    jobs = [(Counting(label=ends, ends=ends), tmp_path / ends) for ends in ("interrupted", "well")]
    with pytest.raises(InterruptedRunError, match="told to end"):
        sweep(jobs, workers=1)
    assert runs(tmp_path / "well") == 0


@pytest.mark.slow
def test_sigterm_ends_the_workers_too(tmp_path: Path) -> None:
    """A scheduler signals one process only; otherwise, the workers would continue, and keep their folders locked."""
    command = [sys.executable, "-m", "kvshift_lab", "reproduce", "cfg", "--jobs", "2", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while len([*tmp_path.glob("cfg/laptop/*/*/metrics.jsonl")]) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        workers = psutil.Process(process.pid).children()
        process.terminate()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command resumes" in said
    assert psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.slow
def test_an_isolated_job_has_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files of the current directory are executed, nor does a job that is killed stop the others."""
    for name in ("joblib", "numpy", "runpy", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')\n")
    monkeypatch.chdir(tmp_path)
    jobs = [(Counting(label=ends, ends=ends), tmp_path / str(n)) for n, ends in enumerate(("well", "killed", "well"))]
    assert sweep(jobs, isolated=True) == [
        "killed, seed 0: its process was killed (often because the system ran out of memory)"
    ]
    found = results([tmp_path / "0", tmp_path / "2"])
    assert len({os.getpid(), *(result["process"] for result in found)}) == 3
    assert all(result["main"] for result in found)  # signals arrive in the main thread


ONCE = """
import os, signal, sys, threading, time
from pathlib import Path
from kvshift_lab.study.sweep import sweep
from tests.study.cases import Waiting

begun, number = Path(sys.argv[1]), int(sys.argv[2])

def interrupt():
    while not (begun / "begun").exists():
        time.sleep(0.01)
    os.killpg(0, number)  # as a terminal does on Ctrl-C

threading.Thread(target=interrupt, daemon=True).start()
try:
    sweep([(Waiting(label="waits"), begun), (Waiting(label="never runs"), begun / "next")], isolated=True)
except Exception as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_isolated_job_is_told_once_to_end(number: signal.Signals, tmp_path: Path) -> None:
    """At a second signal, training would end without a checkpoint."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", ONCE, str(tmp_path), str(int(number))]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True, timeout=300)
    assert ended.returncode == 128 + number
    assert (tmp_path / "received").read_text() == "1"
    assert not (tmp_path / "next").exists()
