"""A run that is killed at any moment and started again ends with the bits of an uninterrupted one."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshift_lab.core.errors import InterruptedRunError, LabError
from kvshift_lab.run.callbacks import GracefulStop
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.run.trainer import LanguageModelTrainer

from ..run_cases import assert_same_run, copied, metrics, tiny, write_corpus

# Forks of a process that has imported everything and computed nothing, so that a child starts at once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["kvshift_lab.run.train"])


def kill_when(state: Callable[[Path], bool], config: TrainConfig) -> None:
    """Train in a child process until the files in its folder are in this state, then kill it with SIGKILL.

    The child is stopped while its files are checked, so that it cannot write. If it has gone beyond the state by then,
    it continues until that state returns.
    """
    child = CONTEXT.Process(target=train, args=(config,))
    child.start()
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and child.is_alive():
            if state(config.out):
                os.kill(child.pid, signal.SIGSTOP)
                time.sleep(0.01)
                if state(config.out):
                    break
                os.kill(child.pid, signal.SIGCONT)
    finally:
        child.kill()
        child.join()
    assert child.exitcode == -signal.SIGKILL
    assert state(config.out)
    assert not (config.out / "result.json").exists()


def whole(out: Path) -> list[int]:
    return sorted(int(path.parent.name.rpartition("-")[2]) for path in out.glob("checkpoint-*/complete"))


def last_step(out: Path) -> int:
    """Return the last step in metrics.jsonl, or 0 if there is none or a line is incomplete."""
    try:
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines), default=0)
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def before_any_checkpoint(out: Path) -> bool:
    return last_step(out) >= 1 and not list(out.glob("checkpoint-*"))


def between_checkpoints(out: Path) -> bool:
    return last_step(out) > max(whole(out), default=99) and len(whole(out)) == len(list(out.glob("checkpoint-*")))


def during_a_checkpoint(out: Path) -> bool:
    """Return True if a checkpoint after the first has its weights, but is not yet complete."""
    return bool(whole(out)) and len(list(out.glob("checkpoint-*/*.safetensors"))) > len(whole(out))


KINDS = {
    "plain": {},
    "documents, accumulated": {
        "data": {"packing": "documents"},
        "batch_size": 2,
        "tokens_per_step": 6 * 37,
        "model": {"shift_constraint": "clamp"},
    },
    "streaming": {"data": {"streaming": True}},  # 40 steps are more than an epoch
}


def options(kind: str, corpus: Path) -> dict:
    chosen = KINDS[kind]
    if kind == "streaming":
        other = str(write_corpus(corpus.with_name("validation.jsonl"), seed=1))
        return {"data": {**chosen["data"], "validation": other}}
    return chosen


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    """A function that returns the folder of the uninterrupted run of a kind, trained at its first use."""
    made = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("whole") / "run"
            train(tiny(corpus, made[kind], steps=40, **options(kind, corpus)))
        return made[kind]

    return get


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("plain", before_any_checkpoint),
        ("plain", between_checkpoints),
        ("plain", during_a_checkpoint),
        ("documents, accumulated", between_checkpoints),
        ("documents, accumulated", during_a_checkpoint),
        ("streaming", between_checkpoints),
    ],
)
@pytest.mark.slow
def test_kill_9(kind, moment, corpus, tmp_path, uninterrupted, capfd):
    config = tiny(corpus, tmp_path / "run", steps=40, **options(kind, corpus))
    kill_when(moment, config)
    found = whole(config.out)
    capfd.readouterr()
    train(config)
    said = capfd.readouterr().err
    assert (f"resuming from checkpoint-{found[-1]}" if found else "starting from the beginning") in said
    assert_same_run(config.out, uninterrupted(kind))
    continued = json.loads((config.out / "environment.json").read_text())["continued"]
    assert [each["step"] for each in continued] == found[-1:] or (continued[0]["step"] == 0 and not found)


def test_killed_after_the_last_checkpoint(corpus, tmp_path, finished):
    """Training is over, but no file records it: the losses of each sequence are recomputed from the same weights."""
    out = copied(finished, tmp_path, without=("result.json", "model/model.safetensors"))
    train(tiny(corpus, out))
    assert_same_run(out, finished)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "documents, accumulated"])
def test_lines_after_a_signal_are_those_of_a_run_without_one(corpus, tmp_path, monkeypatch, kind):
    """Signals come twice within one mean, at a logged step, and at an evaluation whose step is not logged."""
    spread = {"steps": 24, "log_every": 10, "eval_every": 7, "save_every": 12, **KINDS[kind]}
    train(tiny(corpus, tmp_path / "whole", **spread))
    left, end = [3, 7, 10, 17, 19], GracefulStop.on_step_end

    def told_to_leave(self, args, state, control, **kwargs):
        if left and state.global_step == left[0]:
            self._received = signal.SIGTERM
        end(self, args, state, control, **kwargs)

    monkeypatch.setattr(GracefulStop, "on_step_end", told_to_leave)
    config = tiny(corpus, tmp_path / "run", **spread)
    while left:
        with pytest.raises(InterruptedRunError, match=f"after step {left[0]}; checkpoint-{left[0]} is complete"):
            train(config)
        left.pop(0)
    train(config)
    assert [line["step"] for line in metrics(config.out, "train")] == [10, 12, 20, 24]
    assert_same_run(config.out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 11}, "steps: recorded 12, given 11"),
        ({"eval_rows": None}, "eval_rows: recorded 11, given None"),
        ({"tokens_per_step": 296}, "tokens_per_step: recorded 148, given 296"),
        ({"model": {"shift_targets": ()}}, r"model.shift_targets: recorded \['k', 'v'\], given \[\]"),
    ],
    ids=["steps", "eval_rows", "tokens", "targets"],
)
def test_other_options_are_refused_by_name(finished, corpus, tmp_path, change, said):
    """The refusal comes before the tokenizer is touched."""
    out = copied(finished, tmp_path)
    tokenizer = (out / "tokenizer" / "tokenizer.json").read_bytes()
    with pytest.raises(LabError, match=said) as caught:
        train(tiny(corpus, out, **change))
    assert caught.value.exit_code == 2
    assert not (out / "result.json").exists()
    assert (out / "tokenizer" / "tokenizer.json").read_bytes() == tokenizer


def test_model_left_open_is_compared_once_it_is_known(finished, corpus, tmp_path):
    """The second command omits a field, whose default differs from the first command's value."""
    out = tmp_path / "run"
    train(tiny(corpus, out, model={"num_hidden_layers": 3}, steps=1))
    (out / "result.json").unlink()
    with pytest.raises(LabError, match=r"model.num_hidden_layers: recorded 3, given 2"):
        train(tiny(corpus, out, steps=1))


def test_a_signal_in_the_last_evaluation_ends_a_study_after_its_run(corpus, tmp_path, monkeypatch):
    """Otherwise, the next run would begin. What is finished stays finished."""
    evaluate = LanguageModelTrainer.evaluate

    def told_to_leave(self, *args, **kwargs):
        if self.state.global_step == self.args.max_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(LanguageModelTrainer, "evaluate", told_to_leave)
    config = tiny(corpus, tmp_path / "run", steps=2)
    with pytest.raises(InterruptedRunError, match=r"interrupted; the run in .* is finished") as raised:
        train(config)
    assert raised.value.exit_code == 128 + signal.SIGTERM
    assert RunFolder(config.out).result.exists()
    train(config)
