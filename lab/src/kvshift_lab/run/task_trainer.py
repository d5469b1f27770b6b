"""transformers' Trainer for synthetic tasks: accuracy by slice, and early stopping once the task is learned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kvshift_lab.run.callbacks import Evaluation
from kvshift_lab.run.processes import Processes
from kvshift_lab.run.progress import with_progress
from kvshift_lab.run.train_config import RunConfig
from kvshift_lab.run.trainer import RunTrainer
from kvshift_lab.tasks import Batch, Task, TaskBatches, concatenate, count_correct


class TaskTrainer(RunTrainer):
    """Trains on a synthetic task. Each item of the training data set is a whole batch.

    Attributes:
        scores: results of the last evaluation, as returned by `score`, or None before it.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: TrainingArguments,
        config: RunConfig,
        processes: Processes,
        *,
        task: Task,
        train: TaskBatches,
        evaluation: Sequence[Batch],
        dropout_at_eval: bool = False,
    ) -> None:
        self.scores: dict[str, Any] | None = None
        self._task, self._batches, self._dropout = task, evaluation, dropout_at_eval
        super().__init__(
            model,
            arguments,
            config,
            processes,
            train_dataset=train,
            eval_dataset=evaluation,  # required by Trainer; `evaluate` iterates over the batches itself
            data_collator=partial(concatenate, fields=("input_ids", "labels")),  # the loss does not use the slices
        )

    @property
    def has_evaluated(self) -> bool:
        return self.scores is not None

    def evaluation(self, metrics: dict[str, Any]) -> Evaluation:
        """Return the loss and the accuracy by slice."""
        found = ", ".join(f"{name} {value:.3f}" for name, value in metrics["accuracy"].items() if value is not None)
        values = {name: metrics[name] for name in ("loss", "accuracy", "rows")}
        return Evaluation(values, f"validation loss {metrics['loss']:.4f}, accuracy: {found}")

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Score the evaluation batches, log the results and run the callbacks."""
        batches = with_progress(self._batches, "evaluation", "batches", shown=self._config.progress)
        self.scores = score(self.model, batches, self._task.slice_names, self.args.device, dropout=self._dropout)
        self._require_finite_loss(math.isfinite(self.scores["loss"]))
        accuracy = {f"eval_{name}": value for name, value in self.scores["accuracy"].items() if value is not None}
        self.log({"eval_loss": self.scores["loss"], **accuracy})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, self.scores)
        return self.scores

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)  # type: ignore[arg-type]


@torch.no_grad()
def score(
    model: Any, batches: Iterable[Batch], slice_names: Sequence[str], device: torch.device, *, dropout: bool = False
) -> dict[str, Any]:
    """Compute the loss and the accuracy of a causal language model.

    Args:
        model: a model that takes `input_ids` and returns `.logits`.
        batches: batches to score.
        slice_names: names of the task's slices.
        device: device of the model.
        dropout: whether to leave dropout on, as the code behind the published errors on hop-k did.

    Returns:
        "loss", the mean over all labels, in nats; "accuracy" by slice, None for a slice without answers; "answers",
        their number by slice; and "rows", the number of sequences.
    """
    count = len(slice_names)
    right, answers = torch.zeros(count, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    loss, labels, rows = 0.0, 0, 0
    training = model.training
    model.train(dropout)
    for batch in batches:
        logits = model(input_ids=batch.input_ids.to(device), use_cache=False).logits
        following = batch.labels[:, 1:].to(device)
        loss += float(F.cross_entropy(logits[:, :-1].float().flatten(0, 1), following.flatten(), reduction="sum"))
        labels += int((following != -100).sum())
        found, asked = count_correct(logits.argmax(-1).cpu(), batch.labels, batch.slices, count)
        right, answers, rows = right + found, answers + asked, rows + len(batch.input_ids)
    model.train(training)
    return {
        "loss": loss / labels,
        "accuracy": {
            name: int(one) / int(all_) if all_ else None
            for name, one, all_ in zip(slice_names, right, answers, strict=True)
        },
        "answers": dict(zip(slice_names, answers.tolist(), strict=True)),
        "rows": rows,
    }


class EarlyStopping(TrainerCallback):
    """Ends training once the accuracy on one slice has reached `level` in `evaluations` evaluations in a row."""

    def __init__(self, slice_name: str, level: float, evaluations: int, before: Iterable[float | None] = ()) -> None:
        """Create the callback; `before` are the accuracies up to the checkpoint from which the run resumes."""
        self._slice, self._level, self._needed = slice_name, level, evaluations
        self._count = 0
        for accuracy in before:
            self._add(accuracy)

    @property
    def reached(self) -> bool:
        """True once training should end."""
        return self._count >= self._needed

    def _add(self, accuracy: float | None) -> None:
        self._count = self._count + 1 if accuracy is not None and accuracy >= self._level else 0

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._add(metrics["accuracy"][self._slice])
        if self.reached:
            control.should_training_stop = True
