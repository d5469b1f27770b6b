"""Progress of training: the reported line has the loss, tokens per second and the time left."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from kvshift_lab.run import progress
from kvshift_lab.run.callbacks import Evaluation, Progress
from kvshift_lab.run.train_task import train_task

from .test_train_task import tiny


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.mark.parametrize("shown", [True, False])
def test_progress_of_a_resumed_run(clock: list[float], capsys: pytest.CaptureFixture[str], shown: bool) -> None:
    """Step 10 was the last before, each further step takes 4 s, and every second loss is logged."""
    callback = Progress(lambda metrics: Evaluation({}, "validation loss 2.0000"), tokens_per_step=1000, shown=shown)
    state, control = TrainerState(max_steps=50, global_step=10), TrainerControl()
    callback.on_train_begin(None, state, control)
    for step in range(11, 51):
        clock[0] += 4.0
        state.global_step = step
        callback.on_step_end(None, state, control)
        if step % 2 == 0:
            callback.on_log(None, state, control, logs={"loss": 3 - step / 100})
    for _ in range(4):
        clock[0] += 5.0
        callback.on_prediction_step(None, state, control, eval_dataloader=range(4))
    callback.on_evaluate(None, state, control, metrics={})
    callback.on_train_end()
    lines = capsys.readouterr().err.splitlines()
    assert lines.pop() == "step 50 of 50: validation loss 2.0000"
    if not shown:
        assert lines == []
        return
    assert lines[0] == "training: 13 of 50 steps, loss 2.8800, 250 tokens/s, 02:28 left"
    assert lines[-1] == "evaluation: 3 of 4 batches, 00:03 left"
    assert len(lines) == 40 * 4 // 12 + 1


def test_a_run_prints_its_evaluations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_task(tiny(tmp_path, steps=3, progress=True))
    assert re.search(r"step 3 of 3: validation loss \d\.\d{4}", capfd.readouterr().err)
