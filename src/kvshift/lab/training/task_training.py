"""One training run on a synthetic task, in a folder like that of `kvshift train`.

OUT/metrics.jsonl has lines of the kind "train" (loss, learning rate), "eval" (loss, accuracy by slice) and
"coefficients"; OUT/result.json the last evaluation, the answers to the task's questions where it has any, and what the
run took. There is no tokenizer.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Subset
from transformers.utils.logging import disable_progress_bar

from kvshift.lab.core.atomic import write_json
from kvshift.lab.core.errors import LabError, require
from kvshift.lab.core.messages import say
from kvshift.lab.core.options import MACHINE, from_json, to_json
from kvshift.lab.runs.folder import RunFolder, read_metrics
from kvshift.lab.runs.processes import Processes
from kvshift.lab.runs.progress import counted
from kvshift.lab.runs.resume import start_or_resume
from kvshift.lab.tasks import (
    Batch,
    Task,
    TaskBatches,
    TaskConfig,
    WholeTask,
    config_class,
    evaluation_batches,
    make_task,
    task_name,
)
from kvshift.lab.tasks.questions import QuestionTask
from kvshift.lab.training.answers import ask
from kvshift.lab.training.running import (
    attach,
    fit,
    on_cpu,
    open_run,
    peak_memory,
    resolved,
    save_model,
    surviving,
    training_arguments,
)
from kvshift.lab.training.task_trainer import EarlyStopping, TaskTrainer, score
from kvshift.lab.training.train_config import RunConfig
from kvshift.lab.variants.bidirectional import EncoderOptions
from kvshift.lab.variants.building import build_model, count_parameters, describe
from kvshift.lab.variants.by_name import resolve_variant
from kvshift.lab.variants.model_config import ModelConfig
from kvshift.lab.variants.small_gpt2 import GPT2Options


@dataclass(frozen=True, kw_only=True)
class TaskTrainConfig(RunConfig):
    """One run. The same call, given again, continues a run that was stopped.

    Training draws new sequences at every step. Evaluation sequences have a fixed seed of their own, the same for all
    runs.
    """

    out: Path = field(default=Path(), metadata=MACHINE)
    """Folder of the run; made where it is missing. A recipe fills it in."""
    task: TaskConfig
    """What is learned: the config of a class in `kvshift.lab.tasks`."""
    model: ModelConfig | GPT2Options | EncoderOptions = field(default_factory=ModelConfig)
    """What learns it. The vocabulary is the task's."""
    accumulation: int = 1
    """Forward passes of `batch_size` sequences in one optimizer step."""
    eval_rows: int | None = 2048
    """Sequences of an evaluation; None, for a task with an end: all there are."""
    final_eval_rows: int | None = None
    """Sequences of the evaluation that goes into the result; None: those of the last evaluation."""
    eval_batch_size: int | None = None
    """Sequences scored at a time, and questions asked; None: batch_size."""
    dropout_at_eval: bool = False
    """Leave dropout on in evaluations."""
    questions: int = 0
    """Questions asked at the end, of a task whose answers are whole texts."""
    stop_at: float | None = None
    """End training once the accuracy in the task's first slice has been this high in `stop_after` evaluations in a
    row; None: always train `steps`."""
    stop_after: int = 3
    """See `stop_at`."""
    progress: bool = field(default=False, metadata=MACHINE)
    """Tell on stderr how far training is, and each evaluation; several runs at a time would mingle."""
    save_every: int = 1000
    report_to: tuple[str, ...] = field(default=(), metadata=MACHINE)
    log_every: int = 50

    def check(self) -> None:
        """Raise a LabError that names the field, its value, and what it may be."""
        super().check()
        for name in ("accumulation", "stop_after"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("final_eval_rows", "eval_batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "1 or more, or None")
        require(self.questions >= 0, "questions", self.questions, "0 or more")
        level = self.stop_at
        require(level is None or 0 < level <= 1, "stop_at", level, "None, or more than 0 and at most 1")
        if "RANK" in os.environ:
            raise LabError("a task is learned by one process: start it without torchrun")


def task_options(config: TaskTrainConfig) -> dict[str, Any]:
    """The options as JSON; the kinds of task and model have names of their own there."""
    options = to_json(config)
    options["task"] = {"name": task_name(config.task), **options["task"]}
    options["model"] = {"family": config.model.family, **options["model"]}
    return options


def task_of(options: Mapping[str, Any]) -> Task:
    """The task of a run, from what `task_options` wrote of it."""
    values = dict(options["task"])
    return make_task(from_json(config_class(values.pop("name")), values))


def evaluation_of(options: Mapping[str, Any]) -> list[Batch]:
    """The sequences that a run is evaluated on, from what `task_options` wrote of it."""
    return _evaluation_batches(
        task_of(options), options["eval_rows"], options["eval_batch_size"] or options["batch_size"]
    )


def train_task(config: TaskTrainConfig) -> dict[str, Any]:
    """Train, or resume where the same call was interrupted; a finished run is left as it is.

    Returns:
        What OUT/result.json holds.

    Raises:
        LabError: options or folder are not fit (exit code 2), or the folder is in use (4).
        RunFailedError: a number is not finite, or the disk is full (3).
        InterruptedRunError: SIGINT or SIGTERM came (128 + its number).
    """
    config = dataclasses.replace(config, model=resolve_variant(config.model))
    folder = RunFolder(config.out)
    disable_progress_bar()  # transformers' own, for every file that it writes
    smaller = (
        f"Give a smaller batch_size (now {config.batch_size}) with a larger accumulation (now {config.accumulation})"
    )
    with surviving(config, smaller), ExitStack() as stack:
        if not open_run(stack, folder, config, task_options(config)):
            _run(stack, dataclasses.replace(config, **resolved(config)), folder)
    result = folder.read(folder.result)
    assert result is not None
    return result


def _run(stack: ExitStack, config: TaskTrainConfig, folder: RunFolder) -> None:
    cpu_time = time.process_time()
    task = make_task(config.task)
    at_a_time = config.eval_batch_size or config.batch_size
    if config.questions and not isinstance(task, QuestionTask):
        raise LabError(f"questions is {config.questions}, but the task {task_name(config.task)} asks none; expected 0")
    size = describe(config.model, vocab_size=task.vocab_size, length=task.length)
    model = build_model(
        size,
        seed=config.seed,
        variant=config.model.variant,
        freeze_shift=config.model.freeze_shift,
        zero_outputs=isinstance(config.model, ModelConfig) and bool(config.model.zero_outputs),
    )
    processes = Processes(cpu=on_cpu(config))
    start = start_or_resume(folder, task_options(config), processes, say)
    batches = TaskBatches(
        task,
        split="training",
        seed=config.seed,
        batch_size=config.batch_size,
        batches=config.steps * config.accumulation,
    )
    trainer = TaskTrainer(
        model,
        training_arguments(config, accumulation=config.accumulation, batch_size=1),  # an item is a whole batch
        config,
        processes,
        task=task,
        train=batches,
        evaluation=_evaluation_batches(task, config.eval_rows, at_a_time),
        dropout_at_eval=config.dropout_at_eval,
    )
    tokens = config.accumulation * config.batch_size * task.length
    recorder, graceful_stop = attach(
        stack, trainer, config, folder, processes, start, tokens_per_step=tokens, narrated=config.progress
    )
    if config.stop_at is not None:
        before = [line["accuracy"][task.slice_names[0]] for line in read_metrics(folder.metrics, "eval")]
        early_stopping = EarlyStopping(task.slice_names[0], config.stop_at, config.stop_after, before)
        trainer.add_callback(early_stopping)
        if early_stopping.reached:  # at the step of the checkpoint: training had ended there
            trainer.args.max_steps = start.step
            trainer.train_dataset = Subset(batches, range(start.step * config.accumulation))
    seconds = fit(trainer, recorder, graceful_stop, start, processes)

    scores = trainer.scores
    if config.final_eval_rows is not None:
        batches = _evaluation_batches(task, config.final_eval_rows, at_a_time)
        batches = counted(batches, "last evaluation", "batches", shown=config.progress)
        device = trainer.args.device
        scores = score(model, batches, task.slice_names, device, dropout=config.dropout_at_eval)
    answers = {}
    if isinstance(task, QuestionTask) and config.questions:
        model.eval()
        answers = ask(model, task, config.questions, seed=0, batch_size=at_a_time, shown=config.progress)
    save_model(trainer, folder, processes)
    recorded = folder.read(folder.config) or {}
    write_json(
        folder.result,
        {
            "config_hash": recorded.get("config_hash"),
            "steps": trainer.state.global_step,
            "tokens": trainer.state.global_step * tokens,
            "evaluation": scores,
            "answers": answers,
            "seconds": seconds,
            # None where a part of the run was another process's
            "processor_seconds": time.process_time() - cpu_time if start.step == 0 else None,
            "peak_memory_bytes": peak_memory(trainer.args.device),
            **count_parameters(model),
        },
    )


def _evaluation_batches(task: Task, rows: int | None, batch_size: int) -> list[Batch]:
    """The first `rows` evaluation sequences, always the same ones; of a task that has an end, all there are."""
    if isinstance(task, WholeTask):
        return [task.whole_table()]
    if rows is None:
        raise LabError("eval_rows must be a number for a task whose sequences have no end; got None")
    return evaluation_batches(task, rows, batch_size, seed=0)
