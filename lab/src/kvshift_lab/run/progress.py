"""Progress of long operations: a bar if stderr is a terminal, otherwise a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm.auto import tqdm

from kvshift_lab.core.messages import log

Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 10.0  # minimum time between two lines, without a terminal
_SHORT = 3.0  # seconds before a bar appears, so that short operations show none


class ProgressReporter:
    """Reports the progress of one long operation. Operations that take a few seconds are not reported.

    Attributes:
        note: text that is reported with the progress, such as a loss.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        *,
        done: int = 0,
        shown: bool = True,
        log: Callable[[str], object] = log,
    ) -> None:
        """Start counting.

        Args:
            what: name of the operation, such as "evaluation".
            total: total number of units. None: unknown.
            unit: name of the units, such as "batches". For "bytes", lines give megabytes.
            done: number of units that were finished before.
            shown: whether to report anything.
            log: prints a line.
        """
        self._what, self._total, self._unit, self._shown, self._log = what, total, unit, shown, log
        self._start = self._said = time.perf_counter()
        disable = None if shown else True  # None disables the bar if stderr is not a terminal
        self._bar: Any = tqdm(
            desc=what,
            total=total,
            initial=done,
            unit="B" if unit == "bytes" else f" {unit}",
            unit_scale=unit == "bytes",
            delay=_SHORT,
            leave=False,
            dynamic_ncols=True,
            disable=disable,
        )
        self._first = self._done = done
        self._tokens = 0
        self.note = ""

    def update(self, count: int = 1, *, tokens: int = 0) -> None:
        """Add `count` finished units and their `tokens`, for which tokens per second are reported."""
        self._done, self._tokens = self._done + count, self._tokens + tokens
        now = time.perf_counter()
        spent = max(now - self._start, 1e-9)
        speed = f"{self._tokens / spent:,.0f} tokens/s" if self._tokens else ""
        described = [part for part in (self.note, speed) if part]
        self._bar.set_postfix_str(", ".join(described), refresh=False)
        self._bar.update(count)
        if not self._shown or not self._bar.disable or now - self._said < SECONDS_BETWEEN_LINES:
            return
        self._said = now
        parts = [self._amount(), *described]
        if self._total is not None and self._done > self._first:
            left = spent * (self._total - self._done) / (self._done - self._first)
            parts.append(f"{tqdm.format_interval(max(left, 0))} left")
        self._log(f"{self._what}: {', '.join(parts)}")

    def _amount(self) -> str:
        known = [self._done] if self._total is None else [self._done, self._total]
        if self._unit == "bytes":
            return f"{' of '.join(f'{number / 1e6:,.1f}' for number in known)} MB"
        return f"{' of '.join(f'{number:,}' for number in known)} {self._unit}"

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def with_progress(items: Sequence[Item], what: str, unit: str, *, shown: bool) -> Iterator[Item]:
    """Iterate over `items` and report progress with a `ProgressReporter`."""
    counter = ProgressReporter(what, len(items), unit, shown=shown)
    try:
        for item in items:
            yield item
            counter.update()
    finally:
        counter.close()
