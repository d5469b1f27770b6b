"""Clocks, turns and quartiles.

Contestants take turns within each round, so that a machine that slows down does so to all. A round gives each
contestant one time, and a ratio to the baseline's of the same round; medians over rounds count.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

__all__ = ["Clock", "EventClock", "Quartiles", "Times", "WallClock", "describe", "keep_memory", "measure", "quartiles"]

_MOST_CALLS = 20  # in one turn: a CUDA stream takes about a thousand launches before it makes the host wait
_LONGEST_HEAD_START = 1.0  # seconds


class Clock(Protocol):
    """Times calls."""

    def turn(self, run: Callable[[int], object], first: int, count: int) -> tuple[float, float | None]:
        """Call run(first), run(first + 1) ... `count` times.

        Returns:
            Seconds of one call; and seconds that the host takes to make it, where that is something else.
        """
        ...


class WallClock:
    """What a user waits for."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        """`wait` blocks until the device is done."""
        self._wait = wait

    def turn(self, run: Callable[[int], object], first: int, count: int) -> tuple[float, float | None]:
        self._wait()
        start = time.perf_counter()
        for number in range(first, first + count):
            run(number)
        self._wait()
        return (time.perf_counter() - start) / count, None


class EventClock:
    """How long a CUDA device works, however slow the host is to ask for it.

    The device first spins, so that all calls of a turn stand in its queue when it comes to the first of them. A head
    start that was over too soon is doubled, and the turn taken again; calls that themselves wait for the device can
    have none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spin(1_000_000)  # the first launch loads the kernel
        cycles = 20_000_000
        start, end = self._event(), self._event()
        start.record()
        self._spin(cycles)
        end.record()
        end.synchronize()
        self._cycles_per_second = cycles / (start.elapsed_time(end) / 1e3)
        self._head_start = 1e-3

    def turn(self, run: Callable[[int], object], first: int, count: int) -> tuple[float, float | None]:
        while True:
            start, end = self._event(), self._event()
            torch.cuda.synchronize(self._device)
            self._spin(int(self._head_start * self._cycles_per_second))
            start.record()
            begin = time.perf_counter()
            for number in range(first, first + count):
                run(number)
            calling = time.perf_counter() - begin
            end.record()
            ahead = not start.query()
            end.synchronize()
            if ahead or self._head_start >= _LONGEST_HEAD_START:
                if not ahead:
                    self._head_start = 1e-3
                return start.elapsed_time(end) / 1e3 / count, calling / count
            self._head_start = max(2 * self._head_start, min(1.5 * calling, _LONGEST_HEAD_START))

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _spin(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)  # PyTorch's own tests of streams use it; there is no public one


@dataclass
class Times:
    """Of one contestant: seconds of a call, by round.

    Attributes:
        seconds: of the rounds that count.
        host: seconds that the host takes to make a call, where the clock tells.
        calls: in each turn.
        failure: what ended its turns, if anything did.
    """

    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    calls: int = 1
    failure: str | None = None


def measure(
    contestants: Mapping[str, Callable[[int], object]],
    clock: Clock,
    rounds: int,
    *,
    turn_seconds: float = 1e-3,
    warm_up: int = 2,
) -> dict[str, Times]:
    """Time the contestants in turns.

    Args:
        contestants: each is called with a number that counts up: for choosing among sets of inputs.
        clock: of all of them.
        rounds: that count.
        turn_seconds: a turn is as many calls as fill it, 20 at most.
        warm_up: rounds of one call each that come before and do not count.
    """
    found = {name: Times() for name in contestants}
    number = 0
    for at in range(warm_up + rounds):
        for name, run in contestants.items():
            times = found[name]
            if times.failure is not None:
                continue
            try:
                seconds, host = clock.turn(run, number, times.calls if at >= warm_up else 1)
            except Exception as error:  # one that runs out of memory must not end the others
                times.failure = describe(error)
                continue
            number += times.calls
            if at >= warm_up:
                times.seconds.append(seconds)
                if host is not None:
                    times.host.append(host)
            else:
                times.calls = max(1, min(_MOST_CALLS, math.ceil(turn_seconds / max(seconds, 1e-9))))
    return found


def describe(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


@dataclass(frozen=True)
class Quartiles:
    """Median and the quartiles around it."""

    low: float
    median: float
    high: float


def quartiles(values: list[float]) -> Quartiles:
    """Of one value or more."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def keep_memory() -> bool:
    """Have the C library keep freed memory, as the allocators do that PyTorch recommends for a CPU.

    glibc hands large blocks back to the system at once, and taking new pages then costs more than what is measured.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, 2**30) and mallopt(trim_threshold, 2**31 - 1))
