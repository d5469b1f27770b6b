"""Training runs on a synthetic task, whose folders have the layout of `kvshift train` but no tokenizer.

OUT/metrics.jsonl contains lines of the kinds "train" (loss, learning rate), "eval" (loss, accuracy by slice) and
"coefficients". OUT/result.json contains the last evaluation, the scores on the task's questions, if it has any, and the
time and memory that the run took.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Subset
from transformers.utils.logging import disable_progress_bar

from kvshift_lab.core.atomic import write_json
from kvshift_lab.core.errors import LabError, require
from kvshift_lab.core.messages import log
from kvshift_lab.core.options import MACHINE_SPECIFIC, from_json, to_json
from kvshift_lab.run.answers import answer_accuracy
from kvshift_lab.run.folder import RunFolder, read_metrics
from kvshift_lab.run.inputs import identify_inputs
from kvshift_lab.run.lifecycle import (
    add_callbacks,
    explain_training_errors,
    fit,
    peak_memory,
    prepare_run_folder,
    save_model,
    training_arguments,
)
from kvshift_lab.run.processes import Processes
from kvshift_lab.run.progress import with_progress
from kvshift_lab.run.resolve import resolve_defaults, uses_cpu
from kvshift_lab.run.resume import start_or_resume
from kvshift_lab.run.task_trainer import EarlyStopping, TaskTrainer, score
from kvshift_lab.run.train_config import RunConfig
from kvshift_lab.tasks import (
    Batch,
    MaskedTextConfig,
    Task,
    TaskBatches,
    TaskConfig,
    WholeTask,
    config_class,
    evaluation_batches,
    make_task,
    task_name,
)
from kvshift_lab.tasks.questions import QuestionTask
from kvshift_lab.variants.bidirectional import EncoderOptions
from kvshift_lab.variants.building import build_model, count_parameters, describe, freeze_shift
from kvshift_lab.variants.by_name import resolve_variant
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.small_gpt2 import GPT2Options


@dataclass(frozen=True, kw_only=True)
class TaskTrainConfig(RunConfig):
    """Options of a training run on a task. Repeating the same call resumes an interrupted run.

    Training draws new sequences at every step. The evaluation sequences have a separate, fixed seed and are the same
    for all runs.
    """

    out: Path = field(default=Path(), metadata=MACHINE_SPECIFIC)
    """Folder of the run; created if missing. Recipes fill it in."""
    task: TaskConfig
    """Config of the task to learn, a class in `kvshift_lab.tasks`."""
    model: ModelConfig | GPT2Options | EncoderOptions = field(default_factory=ModelConfig)
    """Model to train. Its vocabulary is that of the task."""
    accumulation: int = 1
    """Number of forward passes, each of `batch_size` sequences, per optimizer step."""
    eval_rows: int | None = 2048
    """Number of sequences in an evaluation. Give None for a task with finitely many, which always uses all of them."""
    final_eval_rows: int | None = None
    """Number of sequences in a final evaluation, for the result. None: the result is the last regular evaluation,
    as it must be for a task with finitely many."""
    eval_batch_size: int | None = None
    """Number of sequences scored, or questions answered, at a time. None: batch_size."""
    dropout_at_eval: bool = False
    """Leave dropout on in evaluations."""
    questions: int = 0
    """Number of questions to answer after training, for tasks that have them (`QuestionTask`)."""
    stop_at: float | None = None
    """End training once the accuracy on the task's first slice has reached this value in `stop_after` evaluations in a
    row. None: always train `steps` steps."""
    stop_after: int = 3
    """Number of evaluations in a row for `stop_at`."""
    progress: bool = field(default=False, metadata=MACHINE_SPECIFIC)
    """Show progress and evaluations on stderr. The output of concurrent runs would be interleaved."""
    save_every: int = 1000
    report_to: tuple[str, ...] = field(default=(), metadata=MACHINE_SPECIFIC)
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
            raise LabError("training on a task takes one process: start it without torchrun")


def task_options(config: TaskTrainConfig) -> dict[str, Any]:
    """Return the options as JSON, with the warm-up, the name of the task, and the model's family and variant."""
    warmup = dataclasses.replace(config.optimizer, warmup_steps=config.warmup_steps)
    options = to_json(dataclasses.replace(config, model=resolve_variant(config.model), optimizer=warmup))
    options["task"] = {"name": task_name(config.task), **options["task"]}
    options["model"] = {"family": config.model.family, **options["model"]}
    return options


def identify_task_inputs(task: TaskConfig) -> dict[str, str]:
    """Return what identifies the text of a task that reads one; the options determine all other tasks."""
    return identify_inputs(task.data_config()) if isinstance(task, MaskedTextConfig) else {}


def task_of(options: Mapping[str, Any]) -> Task:
    """Return the task of a run, given its options as JSON (`task_options`)."""
    values = dict(options["task"])
    return make_task(from_json(config_class(values.pop("name")), values))


def evaluation_of(options: Mapping[str, Any]) -> list[Batch]:
    """Return the evaluation batches of a run, given its options as JSON (`task_options`)."""
    return _evaluation_batches(
        task_of(options), options["eval_rows"], options["eval_batch_size"] or options["batch_size"]
    )


def train_task(config: TaskTrainConfig) -> dict[str, Any]:
    """Train a model on a task, or resume an interrupted run. A finished run is not changed.

    Returns:
        The contents of OUT/result.json.

    Raises:
        LabError: an option or the folder is invalid (exit code 2), or the folder is in use (4).
        RunFailedError: a loss, gradient or logit is not finite, or memory or disk space ran out (3).
        InterruptedRunError: the run was ended by SIGINT or SIGTERM (128 + signal number).
    """
    folder = RunFolder(config.out)
    disable_progress_bar()  # which transformers shows for every file that it writes
    smaller = (
        f"Give a smaller batch_size (now {config.batch_size}) with a larger accumulation (now {config.accumulation})"
    )
    with explain_training_errors(config, smaller), ExitStack() as stack:
        identify = partial(identify_task_inputs, config.task)
        inputs = prepare_run_folder(stack, folder, config, lambda: task_options(config), identify)
        if inputs is not None:
            _run(stack, resolve_defaults(config), inputs, folder)
    result = folder.read(folder.result)
    assert result is not None
    return result


def _run(stack: ExitStack, config: TaskTrainConfig, inputs: dict[str, str], folder: RunFolder) -> None:
    cpu_time = time.process_time()
    task = make_task(config.task)
    at_a_time = config.eval_batch_size or config.batch_size
    if config.questions and not isinstance(task, QuestionTask):
        raise LabError(
            f"questions must be 0 for the task {task_name(config.task)}, which has none; got {config.questions}"
        )
    if config.final_eval_rows is not None and isinstance(task, WholeTask):
        raise LabError(
            f"final_eval_rows must be None for the task {task_name(config.task)}, whose evaluations use all of its "
            f"sequences; got {config.final_eval_rows}"
        )
    size = describe(config.model, vocab_size=task.vocab_size, length=task.length)
    model = build_model(
        size,
        seed=config.seed,
        variant=config.model.variant,
        zero_outputs=isinstance(config.model, ModelConfig) and bool(config.model.zero_outputs),
    )
    freeze_shift(model, config.model)
    processes = Processes(cpu=uses_cpu(config))
    start = start_or_resume(folder, task_options(config), processes, log, inputs)
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
    recorder, graceful_stop = add_callbacks(
        stack, trainer, config, folder, processes, start, tokens_per_step=tokens, log_evaluations=config.progress
    )
    if config.stop_at is not None:
        before = [line["accuracy"][task.slice_names[0]] for line in read_metrics(folder.metrics, "eval")]
        early_stopping = EarlyStopping(task.slice_names[0], config.stop_at, config.stop_after, before)
        trainer.add_callback(early_stopping)
        if early_stopping.reached:  # training had already ended at the step of the checkpoint
            trainer.args.max_steps = start.step
            trainer.train_dataset = Subset(batches, range(start.step * config.accumulation))
    seconds = fit(trainer, recorder, graceful_stop, start)

    scores = trainer.scores
    if config.final_eval_rows is not None:
        batches = _evaluation_batches(task, config.final_eval_rows, at_a_time)
        batches = with_progress(batches, "last evaluation", "batches", shown=config.progress)
        device = trainer.args.device
        scores = score(model, batches, task.slice_names, device, dropout=config.dropout_at_eval)
    answers = {}
    if isinstance(task, QuestionTask) and config.questions:
        model.eval()
        answers = answer_accuracy(model, task, config.questions, seed=0, batch_size=at_a_time, shown=config.progress)
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
            # None if another process trained a part of the run
            "processor_seconds": time.process_time() - cpu_time if start.step == 0 else None,
            "peak_memory_bytes": peak_memory(trainer.args.device),
            **count_parameters(model),
        },
    )
    graceful_stop.end_if_received(folder.path)


def _evaluation_batches(task: Task, rows: int | None, batch_size: int) -> list[Batch]:
    """Return the first `rows` evaluation sequences, always the same; all sequences for a task with finitely many."""
    if isinstance(task, WholeTask):
        return [task.whole_table()]
    if rows is None:
        raise LabError("eval_rows must be a number for a task with infinitely many sequences, got None")
    return evaluation_batches(task, rows, batch_size, seed=0)
