"""transformers' Trainer with kvshift's parameter groups, data order, losses per sequence and sealed checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from kvshift_lab.core.errors import DivergedError, LabError, RunFailedError
from kvshift_lab.core.messages import log
from kvshift_lab.data.order import EndlessStream, ShuffledEpochs
from kvshift_lab.run.callbacks import Evaluation
from kvshift_lab.run.checkpoints import is_complete, list_checkpoints, mark_complete, remove_old_checkpoints
from kvshift_lab.run.optimizer import adamw
from kvshift_lab.run.probes import probe_heads, probe_targets, summarize_targets
from kvshift_lab.run.processes import Processes
from kvshift_lab.run.train_config import RunConfig
from kvshift_lab.variants.building import rewrite_config_as_llama

# File in checkpoints made between two lines of metrics: the step after which the current mean loss begins, and the sum
# of the losses so far in each process.
_UNLOGGED = "unlogged_loss.json"


class RunTrainer(Trainer):
    """Trainer whose checkpoints are complete or absent; all processes stop at the first non-finite loss or gradient."""

    def __init__(
        self, model: nn.Module, arguments: TrainingArguments, config: RunConfig, processes: Processes, **kwargs: Any
    ) -> None:
        self._config = config
        self._processes = processes
        self._before_save: Callable[[], None] = lambda: None
        self._last_loss = math.nan
        self._unlogged: dict[str, Any] = {}
        super().__init__(model, arguments, **kwargs)

    @property
    @abstractmethod
    def has_evaluated(self) -> bool:
        """True if this trainer has run an evaluation."""

    @abstractmethod
    def evaluation(self, metrics: dict[str, Any]) -> Evaluation:
        """Convert Trainer's metrics of an evaluation to records and text."""

    def before_save(self, function: Callable[[], None]) -> None:
        """Register a function to call in the first process before each checkpoint is marked complete."""
        self._before_save = function

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create AdamW with the parameter groups of `kvshift.param_groups`."""
        if self.optimizer is None:
            trained = cast(nn.Module, self.model if model is None else model)
            self.optimizer = adamw(trained, self._config.optimizer, self.args.device)
        return self.optimizer

    def restore_running_loss(self, checkpoint: str) -> None:
        """Restore a checkpoint's partial sum of losses, so that the next mean that is logged includes earlier steps."""
        path = Path(checkpoint) / _UNLOGGED
        self._unlogged = json.loads(path.read_text()) if path.exists() else {}

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Stop the run if a checkpoint lacks weights of the model or has others, for which Trainer only warns."""
        tied = cast(PreTrainedModel, self.model).all_tied_weights_keys
        for keys, what in (
            (set(load_result.missing_keys) - tied.keys(), "lacks {} weights of the model"),
            (set(load_result.unexpected_keys), "has {} weights that the model does not have"),
        ):
            if keys:
                raise LabError(f"the checkpoint {what.format(len(keys))}, such as {min(keys)}")

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._unlogged:  # by now, Trainer has reset its sum to 0
            sums = self._unlogged["sums"]
            same = len(sums) == self.args.world_size
            self._tr_loss += sums[self.args.process_index] if same else sum(sums) / len(sums)
            self._globalstep_last_logged = self._unlogged["after_step"]
            self._unlogged = {}
        loss = super().training_step(*args, **kwargs)
        self._last_loss = loss
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Stop the run if the gradient norm is not finite.

        Every process knows the norm, every loss of the step affects it, and the weights have not been updated yet.
        """
        norm = super()._get_grad_norm(*args, **kwargs)
        if norm is not None and not math.isfinite(norm):
            cause = (
                "The usual cause is too high a learning rate (optimizer.learning_rate "
                f"{self._config.optimizer.learning_rate}) or too short a warm-up"
                if self.state.global_step
                else "No weight has been updated yet: the cause is in the model's options or in its initial weights"
            )
            step = self.state.global_step + 1
            self._fail(
                f"the loss or the gradient is not finite at step {step} (last loss {float(self._last_loss)}, gradient "
                f"norm {float(norm)}). {cause}",
                step,
            )
        return norm

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = self._config.out / f"checkpoint-{self.state.global_step}"
        sums: list[float] = []
        if self.state.global_step > self._globalstep_last_logged:
            sums = self._processes.gather(cast(Tensor, self._tr_loss).item())

        def write() -> None:
            super(RunTrainer, self)._save_checkpoint(model, trial)
            if sums and self._processes.is_main:
                unlogged = {"after_step": self._globalstep_last_logged, "sums": sums}
                (folder / _UNLOGGED).write_text(json.dumps(unlogged))

        self._collectively(folder, write)
        self._collectively(folder, (lambda: self._mark_complete(folder)) if self._processes.is_main else lambda: None)
        if self._processes.is_main:
            remove_old_checkpoints(folder, self._config.keep_checkpoints, log)

    def _mark_complete(self, folder: Path) -> None:
        self._before_save()
        rewrite_config_as_llama(folder)
        mark_complete(folder)

    def _collectively(self, folder: Path, write: Callable[[], None]) -> None:
        """Call `write`. If it fails in any process, remove the incomplete checkpoint and stop all processes."""
        problem = None
        try:
            write()
        except (OSError, RuntimeError, SafetensorError, RunFailedError) as error:  # RuntimeError: from torch.save
            problem = error
        # Writing sharded weights is a collective operation: if one process fails, the others wait inside `write`, not
        # here, until the launcher ends them.
        sharded = self.is_fsdp_enabled
        # `any_process` also waits for the slowest process.
        if problem is None and (not self._processes.any_process(False) or sharded):
            return
        if not sharded and problem is not None:
            self._processes.any_process(True)
        if self._processes.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        if problem is None:
            raise SystemExit(RunFailedError.exit_code)
        free = shutil.disk_usage(folder.parent).free
        raise RunFailedError(
            f"{folder.name} could not be written ({free / 2**20:.0f} MiB are free in {folder.parent}): {problem}; "
            f"{self._describe_kept_checkpoint()}"
        ) from problem

    def _fail(self, message: str, step: int) -> None:
        """Stop the run; all processes must call this method, and the first reports the message and what is kept."""
        if not self._processes.is_main:
            raise SystemExit(DivergedError.exit_code)
        raise DivergedError(f"{message}; {self._describe_kept_checkpoint()}", step)

    def _describe_kept_checkpoint(self) -> str:
        complete = [folder for folder in list_checkpoints(self._config.out) if is_complete(folder)]
        return f"{complete[-1].name} is kept" if complete else "there is no earlier checkpoint"

    def _require_finite_loss(self, finite: bool) -> None:
        """Stop the run unless `finite`, which tells whether the loss of the evaluation is finite."""
        step = self.state.global_step
        if not finite:
            self._fail(f"the validation loss is not finite after step {step}", step)


class LanguageModelTrainer(RunTrainer):
    """Trains on sequences of tokens and computes the validation loss of each sequence.

    Attributes:
        sequence_losses: mean loss of each validation sequence in the last evaluation, in nats per token, in order.
        sequence_tokens: number of predicted tokens of each validation sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: TrainingArguments,
        config: RunConfig,
        processes: Processes,
        *,
        train: Any,
        validation: Dataset,
        collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]],
        vocab_size: int,
    ) -> None:
        self.sequence_losses: np.ndarray | None = None
        self.sequence_tokens: np.ndarray | None = None
        self._probes = getattr(config, "probes", None) is not None
        self._vocab_size = vocab_size  # of the tokenizer: a model may have more embeddings, which are never trained
        self._probed: dict[str, Any] = {}
        super().__init__(
            model,
            arguments,
            config,
            processes,
            train_dataset=train if isinstance(train, Dataset) else EndlessStream(train),
            eval_dataset=validation,
            data_collator=collate,
            compute_metrics=self._keep_and_summarize,
        )

    @property
    def has_evaluated(self) -> bool:
        return self.sequence_losses is not None

    def evaluation(self, metrics: dict[str, Any]) -> Evaluation:
        """Return the loss with its standard error over sequences, and the perplexity (see `summarize`)."""
        loss, error = metrics["eval_loss"], metrics.get("eval_loss_stderr")
        values = {
            "loss": loss,
            "loss_stderr": error,
            "perplexity": metrics["eval_perplexity"],
            "rows": metrics["eval_rows"],
        }
        margin = f" +- {error:.4f}" if error is not None else ""
        text = f"validation loss {loss:.4f}{margin}, perplexity {values['perplexity']:.2f}"
        if self._probed:
            text += f", prefix matching {self._probed['prefix_matching']:.3f}"
        return Evaluation(values, text, self._probed)

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if not isinstance(dataset, Dataset):
            return None
        args = self.args
        in_a_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return ShuffledEpochs(len(dataset), args.max_steps * in_a_step, self._config.seed)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Tensor, Tensor]:
        """Return the sum of losses of each sequence in place of logits, and their number in place of labels."""
        inputs = {**self._prepare_inputs(inputs)}
        labels = inputs.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs).logits
        if not self._probes:
            return (None, *sequence_losses(logits, labels))
        losses = token_losses(logits, labels)
        sums, counts = probe_targets(torch.stack(losses), labels, inputs["input_ids"], inputs.get("position_ids"))
        sums[:, 0] = torch.stack([one.sum() for one in losses])  # same order of summation, and bits, as without probes
        return None, sums, counts

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Run the evaluation and add the results of the probes to its metrics, as separate numbers for trackers."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._probes:
            with self.compute_loss_context_manager():
                self._probed = probe_heads(self.model, self._vocab_size) | self._probed
            numbers = {name: value for name, value in self._probed.items() if name != "heads"}
            for head in self._probed["heads"]:
                scores = {name: value for name, value in head.items() if name not in ("layer", "head")}
                numbers |= {f"{name}/L{head['layer']}H{head['head']}": value for name, value in scores.items()}
            assert output.metrics is not None
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in numbers.items()})
        return output

    def _keep_and_summarize(self, prediction: EvalPrediction) -> dict[str, float]:
        sums, tokens = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
        if self._probes:
            self._probed = summarize_targets(sums, tokens)
            sums, tokens = sums[:, 0], tokens[:, 0]
        self._require_finite_loss(bool(np.isfinite(sums).all()))
        self.sequence_losses, self.sequence_tokens = sums / np.maximum(tokens, 1), tokens
        return summarize(sums, tokens)


def sequence_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of -log p(next token) over each sequence, in nats, (B,) float64, and the number of tokens, (B,).

    Args:
        logits: logits of the model, (B, T, V).
        labels: labels, (B, T). The label at t is predicted from position t - 1; -100 marks a position without label.
    """
    return torch.stack([one.sum() for one in token_losses(logits, labels)]), (labels[:, 1:] != -100).sum(dim=1)


def token_losses(logits: Tensor, labels: Tensor) -> list[Tensor]:
    """Return -log p(next token) at every position except the last of each sequence, (T - 1,) float64; 0 without label.

    Args:
        logits, labels: as in `sequence_losses`.
    """
    # One sequence at a time: the float32 copy of the logits of a whole batch may not fit in memory.
    return [
        F.cross_entropy(one[:-1].float(), target, ignore_index=-100, reduction="none").double()
        for one, target in zip(logits, labels[:, 1:], strict=True)
    ]


def summarize(sums: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """Return the mean loss per token, its standard error over sequences, and the perplexity exp(loss).

        loss = sum(sums) / sum(tokens)
        loss_stderr = std(sums - loss * tokens) / (mean(tokens) * sqrt(sequences))

    where std divides by n - 1. For sequences of equal length, this is the standard error of the mean of their losses. A
    single sequence has no standard error.
    """
    loss = float(sums.sum() / tokens.sum())
    summary = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "rows": len(sums)}
    if len(sums) > 1:
        spread = float(np.std(sums - loss * tokens, ddof=1))
        summary["loss_stderr"] = spread / (float(tokens.mean()) * math.sqrt(len(sums)))
    return summary
