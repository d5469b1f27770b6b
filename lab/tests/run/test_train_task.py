"""Training on tasks: the files of a run, resuming with the same bits, early stopping, and refused options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.core.errors import LabError
from kvshift_lab.run.task_trainer import EarlyStopping, score
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.run.train_task import TaskTrainConfig, train_task
from kvshift_lab.tasks import (
    HopConfig,
    InductionConfig,
    InductionTask,
    NGramConfig,
    TaskBatches,
    batch_generator,
    count_correct,
    make_task,
)
from kvshift_lab.variants.building import build_model, llama_config
from kvshift_lab.variants.model_config import ModelConfig

TIMES = ("seconds", "processor_seconds", "step_seconds", "peak_memory_bytes")


def tiny(out: Path, **changes: Any) -> TaskTrainConfig:
    """Return options: 11 steps of 5 sequences of 13 tokens, evaluated every third step, saved every fourth."""
    config = TaskTrainConfig(
        out=out,
        task=InductionConfig(length=13, vocab_size=37),
        model=ModelConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        steps=11,
        batch_size=5,
        eval_every=3,
        eval_rows=17,
        save_every=4,
        log_every=1,
        device="cpu",
        progress=False,
    )
    return replace(config, **changes)


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in line.items() if name not in TIMES} for line in found if line["kind"] == kind]


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in TIMES}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("task") / "run"
    train_task(tiny(out))
    return out


def test_what_a_run_leaves(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert (result["steps"], result["tokens"]) == (11, 11 * 5 * 13)
    assert [line["step"] for line in lines(finished, "train")] == list(range(1, 12))
    assert [line["step"] for line in lines(finished, "eval")] == [3, 6, 9, 11]
    assert [line["step"] for line in lines(finished, "coefficients")] == [3, 6, 9, 11]
    last = lines(finished, "eval")[-1]
    assert (last["loss"], last["accuracy"]) == (result["evaluation"]["loss"], result["evaluation"]["accuracy"])
    config = json.loads((finished / "config.json").read_text())
    assert config["task"] == {"name": "induction", **config["task"]}
    assert config["model"]["family"] == "llama"
    assert config["config_hash"] == result["config_hash"]
    assert result["shift_parameters"] == 2 * 2 * 2


def test_training_is_plain_adamw_on_the_tasks_batches(finished: Path) -> None:
    """The losses of the run equal those of a hand-written loop from its first weights."""
    config = tiny(finished)
    task = InductionTask(InductionConfig(length=13, vocab_size=37))
    model = build_model(llama_config(config.model, vocab_size=37, sequence_length=13), seed=0)
    decays = [p for p in model.parameters() if p.dim() == 2 and p.shape != (2, 2)]
    others = [p for p in model.parameters() if not any(p is one for one in decays)]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step, batch in enumerate(TaskBatches(task, split="training", seed=0, batch_size=5, batches=11)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, step / 2)
        logits = model(input_ids=batch.input_ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())
        assert lines(finished, "train")[step]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_the_evaluation_is_that_of_the_saved_model(finished: Path) -> None:
    model = KVShiftLlamaForCausalLM.from_pretrained(finished / "model")
    task = InductionTask(InductionConfig(length=13, vocab_size=37))
    batches = [task.batch(batch_generator("evaluation", 0, number), rows) for number, rows in enumerate((5, 5, 5, 2))]
    found = score(model, batches, task.slice_names, torch.device("cpu"))
    last = lines(finished, "eval")[-1]
    assert (found["accuracy"], found["rows"]) == (last["accuracy"], 17)
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6)
    losses, right = [], torch.zeros(2, dtype=torch.long)
    for batch in batches:
        logits = model(input_ids=batch.input_ids).logits
        losses += [
            float(F.cross_entropy(logits[b, t - 1 : t], batch.labels[b, t : t + 1]).detach())
            for b, t in (batch.labels != -100).nonzero().tolist()
        ]
        right += count_correct(logits.argmax(-1), batch.labels, batch.slices, 2)[0]
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["answers"]["first_repeat"] == 17
    assert found["accuracy"]["first_repeat"] == int(right[0]) / 17


@pytest.mark.parametrize("ended_before", [3, 4, 10])
def test_a_run_that_was_ended_resumes_with_the_same_bits(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_before: int
) -> None:
    def ending(self: TaskBatches, number: int, original: Any = TaskBatches.__getitem__) -> Any:
        if number == ended_before:
            raise MemoryError  # the run does not handle this error: as if the process had been killed
        return original(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(TaskBatches, "__getitem__", ending)
        with pytest.raises(MemoryError):
            train_task(tiny(tmp_path))
    assert not (tmp_path / "result.json").exists()
    result = train_task(tiny(tmp_path))
    for kind in ("train", "eval", "coefficients"):
        assert lines(tmp_path, kind) == lines(finished, kind)
    assert without_times(result) == without_times(json.loads((finished / "result.json").read_text()))
    theirs = load_file(finished / "model" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_finished_run_is_not_trained_again(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskBatches, "__getitem__", lambda self, number: 1 / 0)
    assert train_task(tiny(finished)) == json.loads((finished / "result.json").read_text())


def test_other_options_are_refused(finished: Path) -> None:
    with pytest.raises(LabError, match=r"with other options or inputs:\n  task\.length: recorded 13, given 14"):
        train_task(tiny(finished, task=InductionConfig(length=14, vocab_size=37)))


def test_accumulation_gives_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    """Two forward passes in a step average over all their labels, however these are distributed."""
    task = HopConfig(letters=9, max_hops=2)
    config = tiny(tmp_path / "run", task=task, steps=1, batch_size=3, accumulation=2)
    train_task(config)
    made = make_task(task)
    model = build_model(
        llama_config(config.model, vocab_size=made.vocab_size, sequence_length=made.length), seed=config.seed
    )
    batches = [*TaskBatches(made, split="training", seed=0, batch_size=3, batches=2)]
    ids, labels = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("input_ids", "labels"))
    logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert lines(tmp_path / "run", "train")[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_a_task_with_an_end_is_evaluated_whole(tmp_path: Path) -> None:
    result = train_task(tiny(tmp_path, task=NGramConfig(vocab_size=5, pairs=13), steps=2))
    assert result["evaluation"]["rows"] == result["evaluation"]["answers"]["new"]
    assert 1 < result["evaluation"]["rows"] <= 13


def test_final_sequences(tmp_path: Path) -> None:
    result = train_task(tiny(tmp_path, steps=2, final_eval_rows=23))
    assert result["evaluation"]["rows"] == 23
    assert lines(tmp_path, "eval")[-1]["rows"] == 17


def test_early_stopping_counts_consecutive_evaluations() -> None:
    from transformers import TrainerControl, TrainerState

    def stops(values: list[float | None], before: list[float | None]) -> bool:
        early_stopping, control = EarlyStopping("first", 0.9, 3, before), TrainerControl()
        for value in values:
            early_stopping.on_evaluate(None, TrainerState(), control, metrics={"accuracy": {"first": value}})
        return control.should_training_stop

    assert stops([0.9, 0.95, 1.0], [])
    assert not stops([0.9, 0.95, 0.89, 0.9, 0.9], [])
    assert not stops([0.9, None, 0.9, 0.9], [])
    assert stops([0.9], [0.2, 0.9, 0.9])
    assert not stops([0.9], [0.9, 0.9, 0.2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"accumulation": 0}, "accumulation must be 1 or more, got 0"),
        ({"stop_at": 1.5}, "stop_at must be None, or more than 0 and at most 1, got 1.5"),
        ({"stop_after": 0}, "stop_after must be 1 or more, got 0"),
        ({"final_eval_rows": 0}, "final_eval_rows must be 1 or more, or None, got 0"),
        ({"questions": 3}, "questions must be 0 for the task induction, which has none; got 3"),
        ({"questions": -1}, "questions must be 0 or more, got -1"),
        ({"eval_rows": None}, "eval_rows must be a number for a task with infinitely many sequences, got None"),
        ({"task": NGramConfig(), "final_eval_rows": 7}, "final_eval_rows must be None for the task ngram, .*; got 7"),
        ({"device": "cuda"}, "device is cuda, but PyTorch sees no GPU"),
    ],
    ids=lambda value: next(iter(value)) + str(next(iter(value.values()))) if isinstance(value, dict) else "",
)
def test_bad_options_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if "device" in changes and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(LabError, match=message):
        train_task(tiny(tmp_path, **changes))


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LabError, match="one process"):
        train_task(tiny(tmp_path))


def test_a_run_that_ended_early_ends_there_again(tmp_path: Path) -> None:
    """Even chance is above this level, so training stops after three evaluations, and no further step is trained."""
    config = tiny(tmp_path, steps=40, save_every=3, stop_at=1e-9, task=NGramConfig(vocab_size=2, pairs=3))
    result = train_task(config)
    kinds = [lines(tmp_path, kind) for kind in ("train", "eval", "coefficients")]
    assert result["steps"] == 9
    (tmp_path / "result.json").unlink()
    assert without_times(train_task(config)) == without_times(result)
    assert [lines(tmp_path, kind) for kind in ("train", "eval", "coefficients")] == kinds
