"""Clocks, rounds and quartiles: how implementations of one thing are timed beside each other.

Other work on a machine, its clock and its heat change from second to second. So all implementations are called one
after the other in each round; a round gives each of them a time, and a ratio to the baseline's of the same round, and
medians over rounds count. Neither `torch.utils.benchmark` nor `triton.testing.do_bench` can do that: each times one
function alone, to the end. As a clock of single calls within a round they do not serve either: `Timer.timeit` makes two
more calls before each that it times, which for training steps is three times the work, and `do_bench` clears the cache
and waits before each call. Where nothing is compared round by round (`kvshift.benchmarks.tilings`), `do_bench` serves.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

_MOST_CALLS = 20  # in a row: a CUDA stream takes about a thousand launches before it makes the host wait
_LONGEST_HEAD_START = 1.0  # seconds


class Clock(Protocol):
    """Times calls."""

    def time(self, run: Callable[[int], object], first: int, count: int) -> tuple[float, float | None]:
        """Call run(first), run(first + 1) ... `count` times.

        Returns:
            Seconds of one call; and seconds that the host takes to make it, where that is something else.
        """
        ...


class WallClock:
    """What a user waits for."""

    def __init__(self, wait: Callable[[], object] = lambda: None, now: Callable[[], float] = time.perf_counter) -> None:
        """`wait` blocks until the device is done; `now` is the clock, in seconds."""
        self._wait, self._now = wait, now

    def time(self, run: Callable[[int], object], first: int, count: int) -> tuple[float, float | None]:
        self._wait()
        start = self._now()
        for number in range(first, first + count):
            run(number)
        self._wait()
        return (self._now() - start) / count, None


class EventClock:
    """How long a CUDA device works, however slow the host is to ask for it.

    The device first spins, so that all calls stand in its queue when it comes to the first of them. A head start that
    was over too soon is doubled, and the calls are repeated; calls that themselves wait for the device can
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

    def time(self, run: Callable[[int], object], first: int, count: int) -> tuple[float, float | None]:
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
    """Of one implementation: seconds of a call, by round.

    Attributes:
        seconds: of the rounds that count.
        host: seconds that the host takes to make a call, where the clock tells.
        calls: in a row, in each round.
        failure: what it failed with, if it did.
    """

    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    calls: int = 1
    failure: str | None = None


def measure(
    implementations: Mapping[str, Callable[[int], object]],
    clock: Clock,
    rounds: int,
    *,
    seconds: float = 0.0,
    least_seconds: float = 1e-3,
    warm_up: int = 2,
    there_and_back: bool = False,
) -> dict[str, Times]:
    """Time several implementations of one thing beside each other.

    Args:
        implementations: each is called with a number that counts up: for choosing among sets of inputs.
        clock: of all of them.
        rounds: that count.
        seconds: rounds are added until so many have been spent in those that count.
        least_seconds: each is called as often in a row as fills them, 20 times at most.
        warm_up: rounds of one call each that come before and do not count.
        there_and_back: call them in order and then in reverse order in each round (A B B A), whose times are the means:
            a machine that slows down or speeds up evenly then does so to all alike.
    """
    found = {name: Times() for name in implementations}
    number, spent = 0, 0.0
    for at in itertools.count():
        if at >= warm_up + rounds and (spent >= seconds or all(times.failure for times in found.values())):
            return found
        counts = at >= warm_up
        order = [*implementations, *(reversed([*implementations]) if there_and_back and counts else ())]
        taken: dict[str, list[float]] = {name: [] for name in implementations}
        for name in order:
            times = found[name]
            if times.failure is not None:
                continue
            try:
                each, host = clock.time(implementations[name], number, times.calls if counts else 1)
            except Exception as error:  # one that runs out of memory must not end the others
                times.failure = describe(error)
                continue
            number += times.calls
            if counts:
                spent += each * times.calls
                taken[name].append(each)
                if host is not None:
                    times.host.append(host)
            else:
                times.calls = max(1, min(_MOST_CALLS, math.ceil(least_seconds / max(each, 1e-9))))
        for name, values in taken.items():
            if values and found[name].failure is None:
                found[name].seconds.append(statistics.fmean(values))
    raise AssertionError("a round is the last")


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


def ratios(times: Times, baseline: Times) -> Quartiles:
    """Of the ratios of single rounds."""
    return quartiles([one / other for one, other in zip(times.seconds, baseline.seconds, strict=True)])
