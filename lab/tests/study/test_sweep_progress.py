"""The progress of a sweep, read from the files that its jobs write."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshift_lab.study.sweep_progress import last_step, report_progress

from .cases import Counting


def write(out: Path, text: str) -> None:
    out.mkdir(exist_ok=True)
    (out / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("", 0),
        ('{"kind": "train", "step": 5}\n', 5),
        ('{"step": 5}\n{"step": 6}\n{"st', 6),  # the last line is still being written
        ('{"step": 5}\nnull\n[]\n', 5),
        ('{"step": 7}\n' * 20_000, 7),
    ],
)
def test_the_last_whole_line_tells_the_step(tmp_path: Path, text: str, step: int) -> None:
    write(tmp_path, text)
    assert last_step(tmp_path / "metrics.jsonl") == step


def test_a_run_that_has_not_begun_is_at_step_0(tmp_path: Path) -> None:
    assert last_step(tmp_path / "metrics.jsonl") == 0


def test_where_there_is_no_terminal_lines_tell_how_far_each_run_is(tmp_path: Path, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("kvshift_lab.study.sweep_progress.log", said.append)
    clock = SimpleNamespace(monotonic=itertools.count(0, 60).__next__)
    monkeypatch.setattr("kvshift_lab.study.sweep_progress.time", clock)
    jobs = [(Counting(label=label), tmp_path / label) for label in ("quick", "slow", "last")]

    def wait_for(count: int) -> None:
        end = time.perf_counter() + 30
        while len(said) < count and time.perf_counter() < end:
            time.sleep(0.01)

    with report_progress(jobs, seconds=0.01) as ended:
        write(jobs[1][1], '{"step": 4}\n')
        ended.add(0)
        wait_for(1)
    # One and a half of three runs took a minute, so about a minute is left.
    assert said[-1].startswith("[1 of 3 runs, ")
    assert said[-1].endswith("left] slow, seed 0: step 4 of 8")
    assert said[0] == "[1 of 3 runs, 01:00, about 01:00 left] slow, seed 0: step 4 of 8"
    count = len(said)
    time.sleep(0.05)
    assert len(said) == count, "it ends with the sweep"
