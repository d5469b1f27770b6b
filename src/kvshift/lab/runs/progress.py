"""How far training and evaluations are: a bar where stderr is a terminal; where it is none, lines now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from kvshift.lab.messages import say
from kvshift.lab.training.callbacks import Evaluation, Recorder

__all__ = ["Counter", "Progress", "counted"]

Item = TypeVar("Item")

_APART = 10.0  # seconds between two lines, where there is no terminal
_SHORT = 3.0  # seconds before a bar of what may be done by then


class Counter:
    """Reports the progress of one long piece of work. It is silent about work that takes a few seconds."""

    def __init__(
        self, what: str, total: int | None, unit: str, *, shown: bool = True, say: Callable[[str], object] = say
    ) -> None:
        """Begin to count.

        Args:
            what: is done, such as "evaluation".
            total: number of `unit`s, such as "batches"; None: not known.
            unit: see there; with "bytes", lines say megabytes.
            shown: whether anything is said.
            say: prints a line.
        """
        self._what, self._total, self._unit, self._shown, self._say = what, total, unit, shown, say
        self._start = self._said = time.perf_counter()
        disable = None if shown else True  # None: where stderr is no terminal
        self._bar: Any = tqdm(
            desc=what,
            total=total,
            unit="B" if unit == "bytes" else f" {unit}",
            unit_scale=unit == "bytes",
            delay=_SHORT,
            leave=False,
            dynamic_ncols=True,
            disable=disable,
        )
        self._done = self._tokens = 0

    def update(self, count: int = 1, *, tokens: int = 0) -> None:
        """So many more are done, with so many tokens, of which the speed is reported."""
        self._done, self._tokens = self._done + count, self._tokens + tokens
        now = time.perf_counter()
        spent = max(now - self._start, 1e-9)
        speed = f"{self._tokens / spent:,.0f} tokens/s" if self._tokens else ""
        self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update(count)
        if not self._shown or not self._bar.disable or now - self._said < _APART:
            return
        self._said = now
        parts = [self._amount(), speed]
        if self._total is not None and self._done:
            parts.append(f"{tqdm.format_interval(max(spent * (self._total - self._done) / self._done, 0))} left")
        self._say(f"{self._what}: {', '.join(part for part in parts if part)}")

    def _amount(self) -> str:
        known = [self._done] if self._total is None else [self._done, self._total]
        if self._unit == "bytes":
            return f"{' of '.join(f'{number / 1e6:,.1f}' for number in known)} MB"
        return f"{' of '.join(f'{number:,}' for number in known)} {self._unit}"

    def close(self) -> None:
        """Clear the bar away."""
        self._bar.close()


def counted(items: Sequence[Item], what: str, unit: str, *, shown: bool) -> Iterator[Item]:
    """Go through `items` with a `Counter`."""
    counter = Counter(what, len(items), unit, shown=shown)
    try:
        for item in items:
            yield item
            counter.update()
    finally:
        counter.close()


class Progress(TrainerCallback):
    """Training loss, tokens per second and time left, as a bar or as lines; a bar or lines in long evaluations; a line
    for each evaluation.
    """

    def __init__(
        self,
        recorder: Recorder,
        evaluation: Callable[[dict[str, Any]], Evaluation],
        *,
        tokens_per_step: int,
        shown: bool,
    ) -> None:
        """Without `shown` there are the lines of evaluations alone.

        Args:
            recorder: knows how long steps take; told of each log before this callback is.
            evaluation: turns Trainer's metrics into words.
            tokens_per_step: of all processes together.
            shown: see above.
        """
        self._recorder, self._evaluation, self._tokens, self._shown = recorder, evaluation, tokens_per_step, shown
        self._bar: Any = None
        self._evaluating: Counter | None = None
        self._first, self._start, self._said = 0, 0.0, -_APART

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._first, self._start = state.global_step, time.perf_counter()
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            unit="step",
            dynamic_ncols=True,
            disable=None if self._shown else True,
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._bar.update()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        rate = f"{self._tokens / max(self._recorder.step_seconds, 1e-9):,.0f} tokens/s"
        self._bar.set_postfix_str(f"loss {logs['loss']:.4f}, {rate}", refresh=False)
        now = time.perf_counter()
        if self._shown and self._bar.disable and now - self._said >= _APART:
            self._said = now
            left = (now - self._start) / (state.global_step - self._first) * (state.max_steps - state.global_step)
            say(
                f"step {state.global_step:,} of {state.max_steps:,}: training loss {logs['loss']:.4f}, {rate}, "
                f"{tqdm.format_interval(left)} left"
            )

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if self._evaluating is None:
            self._evaluating = Counter("evaluation", len(eval_dataloader), "batches", shown=self._shown)
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
        """Also after an error, so that its message stands on a line of its own."""
        self._end_evaluation()
        if self._bar is not None:
            self._bar.close()

    def _end_evaluation(self) -> None:
        if self._evaluating is not None:
            self._evaluating.close()
            self._evaluating = None
