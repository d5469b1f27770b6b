"""Timing implementations of the same function side by side, with clocks, rounds and quartiles.

Other work on a machine, its clock rate and its temperature change from second to second. Therefore each round calls all
implementations one after the other. It gives a time for each of them and a ratio to the baseline of the same round; the
results are medians over rounds. `torch.utils.benchmark` and `triton.testing.do_bench` cannot do this: each times one
function from start to end. They are also unsuitable for timing single calls within a round: `Timer.timeit` makes two
more calls before each timed call, which triples the work for training steps, and `do_bench` clears the cache and waits
before each call. Where times are not compared by round (`benchmarks/tilings.py`), `do_bench` is used.
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

_MOST_CALLS = 20  # in a row: a CUDA stream queues about a thousand launches before it blocks the host
_LONGEST_HEAD_START = 1.0  # seconds


class Clock(Protocol):
    """A clock that times calls."""

    def time(self, run: Callable[[int], object], first: int, count: int) -> tuple[float, float | None]:
        """Call run(first), run(first + 1) ... `count` times.

        Returns:
            Seconds of one call, and seconds that the host takes to launch it, or None if there is no difference.
        """
        ...


class WallClock:
    """A clock of the time that a user waits."""

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
    """A clock of the time that a CUDA device works, independent of how slowly the host launches the work.

    The device first spins, so that all calls are queued when it begins the first of them. If it stops spinning too
    early, the time is at least doubled and the calls are repeated, up to `_LONGEST_HEAD_START`: calls that synchronize
    with the device can never be queued in advance.
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
        torch.cuda._sleep(cycles)  # used by PyTorch's tests of streams; there is no public equivalent


@dataclass
class Times:
    """The times of one implementation.

    Attributes:
        seconds: seconds of a call, for each round after the warm-up.
        host: seconds that the host takes to launch a call, if the clock measures it.
        calls: number of consecutive calls in each round.
        failure: error of the implementation, or None.
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
    mirrored: bool = False,
) -> dict[str, Times]:
    """Time several implementations of the same function side by side.

    Args:
        implementations: functions, called with an increasing number that can select one of several sets of inputs.
        clock: clock for all of them.
        rounds: minimum number of rounds after the warm-up.
        seconds: minimum time spent in rounds after the warm-up; further rounds are added to reach it.
        least_seconds: time that consecutive calls of an implementation should fill, with 20 calls at most.
        warm_up: number of preceding rounds of one call each, whose times are discarded.
        mirrored: call the implementations in order and then in reverse order in each round (A B B A), and average
            their times, so that a machine that slows down or speeds up evenly affects all of them equally.
    """
    found = {name: Times() for name in implementations}
    number, spent = 0, 0.0
    for at in itertools.count():
        if at >= warm_up + rounds and (spent >= seconds or all(times.failure for times in found.values())):
            return found
        counts = at >= warm_up
        order = [*implementations, *(reversed([*implementations]) if mirrored and counts else ())]
        taken: dict[str, list[float]] = {name: [] for name in implementations}
        for name in order:
            times = found[name]
            if times.failure is not None:
                continue
            try:
                each, host = clock.time(implementations[name], number, times.calls if counts else 1)
            except Exception as error:  # one that runs out of memory must not stop the others
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
    """Return the type and the first line of an error, with at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


@dataclass(frozen=True)
class Quartiles:
    """The median, and the lower and upper quartile."""

    low: float
    median: float
    high: float


def quartiles(values: list[float]) -> Quartiles:
    """Return the quartiles of one or more values."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def ratios(times: Times, baseline: Times) -> Quartiles:
    """Return the quartiles of the ratios of single rounds."""
    return quartiles([one / other for one, other in zip(times.seconds, baseline.seconds, strict=True)])
