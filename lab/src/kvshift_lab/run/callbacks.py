"""Trainer callbacks: recording metrics, showing progress, and stopping on a signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from kvshift_lab.core.errors import InterruptedRunError
from kvshift_lab.run.folder import Metrics
from kvshift_lab.run.processes import Processes
from kvshift_lab.run.progress import ProgressReporter
from kvshift_lab.variants.variant import shift_layers


@dataclass(frozen=True)
class Evaluation:
    """Results of one evaluation: a record for metrics.jsonl, a summary of it as text, and a record of the probes."""

    values: dict[str, Any]
    text: str
    probes: dict[str, Any] = field(default_factory=dict)


class Schedule(TrainerCallback):
    """Logs at each regular checkpoint, and evaluates and saves after the last step, besides the configured intervals.

    Since metrics are logged at each of these checkpoints, no mean over steps extends across one. A resumed run
    therefore writes the same lines as a run that was never interrupted.
    """

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True
        if control.should_save:
            control.should_log = True


class GracefulStop(TrainerCallback):
    """On SIGINT or SIGTERM, saves a checkpoint and ends training after the current step.

    It logs nothing, so that metrics.jsonl does not differ from that of an uninterrupted run.

    Attributes:
        number: number of the signal on which the run ends, or 0. It is the same in all processes.
    """

    def __init__(self, processes: Processes) -> None:
        self.number = self._received = 0
        self._processes = processes

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the two signals within the context. A second signal ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        self._previous_handlers = before
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end_if_received(self, out: Path) -> None:
        """End the program if a signal arrived too late to stop the run in `out`, which is finished."""
        self.number = self._processes.all_reduce_max(self._received)
        if self.number:
            self.end(f"interrupted; the run in {out} is finished")

    def end(self, message: str) -> NoReturn:
        """End the program, in the first process by an InterruptedRunError with this message."""
        if not self._processes.is_main:
            raise SystemExit(128 + self.number)
        raise InterruptedRunError(message, self.number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        for each, handler in self._previous_handlers.items():
            signal.signal(each, handler)
        name = signal.Signals(number).name
        # `print` is unsafe in a signal handler: it may interrupt another print in the middle of a line.
        if self._processes.is_main:
            os.write(2, f"\nkvshift: {name}: stopping after this step; a second signal stops at once\n".encode())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.number = self._processes.all_reduce_max(self._received)
        if self.number:
            control.should_save = control.should_training_stop = True


class Recorder(TrainerCallback):
    """Writes metrics.jsonl: a line for each log and, for each evaluation, its results, those of the probes and the
    coefficients of each layer.

    Every process needs a recorder, because the coefficients may be sharded; only the first process passes `metrics`,
    to which the lines are written. `evaluation` converts Trainer's metrics to an `Evaluation`.

    Attributes:
        step_seconds: mean time per step, over the steps of the last line of training metrics.
    """

    def __init__(
        self, metrics: Metrics | None, tokens_per_step: int, evaluation: Callable[[dict[str, Any]], Evaluation]
    ) -> None:
        self._metrics, self._tokens, self._evaluation = metrics, tokens_per_step, evaluation
        self._earlier_seconds = metrics.seconds if metrics else 0.0
        self._start = self._last_time = time.perf_counter()
        self._step_time, self._timed_steps = 0.0, 0
        self.step_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Training time in seconds, with evaluations and checkpoints, without the time between stop and resumption."""
        return self._earlier_seconds + time.perf_counter() - self._start

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = self._last_time = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = time.perf_counter()
        self._step_time += now - self._last_time
        self._timed_steps += 1
        self._last_time = now

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._last_time = time.perf_counter()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.step_seconds = self._step_time / max(self._timed_steps, 1)
            self._write(
                "train",
                state,
                loss=logs["loss"],
                learning_rate=logs["learning_rate"],
                grad_norm=float(logs["grad_norm"]),
                step_seconds=self.step_seconds,
                seconds=self.seconds,
            )
            self._step_time, self._timed_steps = 0.0, 0
        self._last_time = time.perf_counter()

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        found = self._evaluation(metrics)
        self._write("eval", state, **found.values)
        if found.probes:
            self._write("probes", state, **found.probes)
        for number, layer in enumerate(coefficients(model)):
            self._write("coefficients", state, layer=number, **layer)
        self._last_time = time.perf_counter()

    def _write(self, kind: str, state: TrainerState, **values: Any) -> None:
        if self._metrics is not None:
            place = {"kind": kind, "step": state.global_step}
            if kind != "coefficients":
                place["tokens"] = state.global_step * self._tokens
            self._metrics.write(**place, **values)


class Progress(TrainerCallback):
    """Shows the progress of training, with loss and tokens per second, and of evaluations, and prints their results."""

    def __init__(
        self, evaluation: Callable[[dict[str, Any]], Evaluation], *, tokens_per_step: int, shown: bool
    ) -> None:
        """Create the callback.

        Args:
            evaluation: converts Trainer's metrics to text.
            tokens_per_step: tokens per optimizer step, over all processes.
            shown: whether to show progress. If False, only the results of evaluations are printed.
        """
        self._evaluation, self._tokens, self._shown = evaluation, tokens_per_step, shown
        self._training: ProgressReporter | None = None
        self._evaluating: ProgressReporter | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._training = ProgressReporter(
            "training", state.max_steps, "steps", done=state.global_step, shown=self._shown
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.update(tokens=self._tokens)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self._training is not None and "loss" in logs:
            self._training.note = f"loss {logs['loss']:.4f}"

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if self._evaluating is None:
            self._evaluating = ProgressReporter("evaluation", len(eval_dataloader), "batches", shown=self._shown)
        self._evaluating.update()

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._end_evaluation()
        text = f"step {state.global_step} of {state.max_steps}: {self._evaluation(metrics).text}"
        tqdm.write(text, file=sys.stderr)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the bars. After an error, this puts the error message on a separate line."""
        self._end_evaluation()
        if self._training is not None:
            self._training.close()

    def _end_evaluation(self) -> None:
        if self._evaluating is not None:
            self._evaluating.close()
            self._evaluating = None


@torch.no_grad()
def coefficients(model: torch.nn.Module) -> list[dict[str, list[list[float]]]]:
    """Return the coefficients of each layer with a shift: alpha (keys), beta (values), gamma (queries), as [head][lag].

    With sharded parameters (FSDP), all processes must call this function.
    """
    names = {"k": "alpha", "v": "beta", "q": "gamma"}
    found = []
    for layer in shift_layers(model):
        gathered = {name: gather_full(parameter) for name, parameter in layer.named_parameters(recurse=False)}
        values = torch.func.functional_call(_Coefficients(layer), {f"layer.{n}": p for n, p in gathered.items()}, ())
        found.append({names[target]: value.float().cpu().tolist() for target, value in values.items()})
    return found


class _Coefficients(torch.nn.Module):
    """Wraps `KVShift.coefficients` as a `forward`, so that `functional_call` can replace the parameters."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> dict[str, Tensor]:
        return self.layer.coefficients()  # type: ignore[operator]


def gather_full(parameter: Tensor) -> Tensor:
    """Return the full tensor, gathered from all processes if it is sharded; then all processes must call it."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[operator]
