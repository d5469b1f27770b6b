"""Progress of a long piece of work: a line now and then, where there is no terminal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvshift_lab.run import progress
from kvshift_lab.run.progress import ProgressReporter, with_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_a_long_evaluation_is_told_and_a_short_one_is_not(clock, capsys: pytest.CaptureFixture[str]) -> None:
    long = ["evaluation: 3 of 7 batches, 00:16 left", "evaluation: 6 of 7 batches, 00:04 left"]
    for seconds, lines in ((0.001, []), (4.0, long)):
        for _ in with_progress(range(7), "evaluation", "batches", shown=True):
            clock[0] += seconds
        assert capsys.readouterr().err.splitlines() == lines
    for _ in with_progress(range(7), "evaluation", "batches", shown=False):
        clock[0] += 4.0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("total", "of", "left"), [(4_000_000, " of 4.0", ", 01:12 left"), (None, "", "")])
def test_bytes_are_told_in_megabytes_with_the_speed_in_tokens(clock, total, of, left) -> None:
    """`kvshift eval` reads texts, and the size of a streamed text is not known."""
    said: list[str] = []
    counter = ProgressReporter("a run", total, "bytes", log=said.append)
    for _ in range(4):
        clock[0] += 6.0
        counter.update(250_000, tokens=60_000)
    counter.close()
    assert said[0].startswith(f"a run: 0.5{of} MB, 10,000 tokens/s")
    assert said[1:] == [f"a run: 1.0{of} MB, 10,000 tokens/s{left}"]
