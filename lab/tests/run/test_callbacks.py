"""Progress of training: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from kvshift_lab.run import callbacks, progress
from kvshift_lab.run.callbacks import Evaluation, Progress
from kvshift_lab.run.train_task import train_task

from .test_train_task import tiny


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    for module in (progress, callbacks):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def follow(clock: list[float], *, seconds: float, shown: bool = True) -> None:
    """Follow 40 steps after step 10, of `seconds` each, with a log at every second step; 1,000 tokens take 0.25 s."""
    callback = Progress(
        SimpleNamespace(step_seconds=0.25),  # type: ignore[arg-type]
        lambda metrics: Evaluation({}, "validation loss 2.0000"),
        tokens_per_step=1000,
        shown=shown,
    )
    state, rest = TrainerState(max_steps=50, global_step=10), (None, TrainerControl())
    callback.on_train_begin(rest[0], state, rest[1])
    for step in range(11, 51):
        clock[0] += seconds
        state.global_step = step
        callback.on_step_end(rest[0], state, rest[1])
        if step % 2 == 0:
            callback.on_log(rest[0], state, rest[1], logs={"loss": 3 - step / 100})
    callback.on_evaluate(rest[0], state, rest[1], metrics={})
    callback.on_train_end()


def test_without_a_terminal_lines_tell_loss_speed_and_time_left(clock, capsys: pytest.CaptureFixture[str]) -> None:
    follow(clock, seconds=4.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 12 of 50: training loss 2.8800, 4,000 tokens/s, 02:32 left"
    assert lines[1].startswith("step 16 of 50: "), "the first after ten seconds"
    assert lines[-2:] == [
        "step 48 of 50: training loss 2.5200, 4,000 tokens/s, 00:08 left",
        "step 50 of 50: validation loss 2.0000",
    ]
    assert len(lines) == 11


def test_fast_steps_do_not_fill_a_log(clock, capsys: pytest.CaptureFixture[str]) -> None:
    follow(clock, seconds=0.001)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_what_is_not_shown_is_told_of_evaluations_alone(clock, capsys: pytest.CaptureFixture[str]) -> None:
    follow(clock, seconds=4.0, shown=False)
    assert capsys.readouterr().err == "step 50 of 50: validation loss 2.0000\n"


def test_on_a_terminal_the_bar_has_loss_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    follow([0.0], seconds=0.0)
    assert "loss 2.5000, 4,000 tokens/s" in terminal.getvalue()
    assert "training loss" not in terminal.getvalue()


def test_trainers_evaluation_is_counted_batch_by_batch(clock, capsys: pytest.CaptureFixture[str]) -> None:
    callback = Progress(SimpleNamespace(), lambda metrics: Evaluation({}, "done"), tokens_per_step=1, shown=True)  # type: ignore[arg-type]
    state, control = TrainerState(max_steps=5, global_step=5), TrainerControl()
    callback.on_train_begin(None, state, control)
    for _ in range(2):
        for _ in range(4):
            callback.on_prediction_step(None, state, control, eval_dataloader=range(4))
            clock[0] += 5.0
        callback.on_evaluate(None, state, control, metrics={})
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["evaluation: 3 of 4 batches, 00:03 left", "step 5 of 5: done"] * 2


def test_a_run_tells_its_training_loss_in_a_log_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_task(tiny(tmp_path, steps=3, progress=True))
    said = capfd.readouterr().err
    assert re.search(r"step 1 of 3: training loss \d\.\d{4}, [\d,]+ tokens/s, \d\d:\d\d left", said)
    assert "step 3 of 3: validation loss" in said
