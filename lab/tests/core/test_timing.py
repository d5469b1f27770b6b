"""Rounds, medians and the clock of a CUDA device, with simulated clocks."""

from __future__ import annotations

import types

import pytest
import torch

from kvshift_lab.core.timing import EventClock, measure, quartiles


class TellingClock:
    """A clock that takes the returned value of each call as its duration."""

    def time(self, run, first, count):
        return sum(run(first + i) for i in range(count)) / count, None


def test_all_are_called_in_each_round_and_warming_up_does_not_count():
    calls = []

    def implementation(name, seconds):
        def run(number):
            calls.append(name)
            return 100.0 if len(calls) <= 4 else seconds  # the two warm-up rounds

        return run

    times = measure({"a": implementation("a", 1.0), "b": implementation("b", 3.0)}, TellingClock(), rounds=3)
    assert calls == ["a", "b"] * 5
    assert times["a"].seconds == [1.0] * 3
    assert times["b"].seconds == [3.0] * 3


def test_there_are_as_many_calls_in_a_row_as_fill_the_time_on_inputs_of_their_own():
    numbers = []

    def run(number):
        numbers.append(number)
        return 0.25e-3

    times = measure({"a": run}, TellingClock(), rounds=2, least_seconds=1e-3, warm_up=1)
    assert times["a"].calls == 4
    assert len(numbers) == 1 + 2 * 4
    assert len(set(numbers[1:])) == 8


def test_one_that_fails_ends_neither_the_others_nor_its_name():
    def run(number):
        raise MemoryError("none left\nat all")

    times = measure({"bad": run, "good": lambda number: 1.0}, TellingClock(), rounds=2)
    assert times["bad"].failure == "MemoryError: none left"
    assert times["good"].seconds == [1.0, 1.0]


def test_quartiles_of_worked_values():
    found = quartiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == quartiles([7.0, 7.0])


class FakeDevice:
    """A simulated CUDA device with its own time: host and device run side by side, as with CUDA streams."""

    def __init__(self, launch: float) -> None:
        self.host = self.device = 0.0
        self.launch = launch  # seconds that the host needs for a call
        self.spins: list[float] = []

    def enqueue(self, seconds: float) -> None:
        self.host += self.launch
        self.device = max(self.device, self.host) + seconds

    def spin(self, cycles: int) -> None:
        self.spins.append(cycles / 1e9)
        self.enqueue(cycles / 1e9)

    def event(self, **_):
        event = types.SimpleNamespace(at=None)

        def record():
            event.at = max(self.device, self.host)

        def synchronize():
            self.host = max(self.host, event.at)

        event.record, event.synchronize = record, synchronize
        event.query = lambda: event.at <= self.host
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event

    def synchronize(self, _=None) -> None:
        self.host = max(self.host, self.device)


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice(launch=50e-6)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.spin)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr("kvshift_lab.core.timing.time", types.SimpleNamespace(perf_counter=lambda: fake.host))
    return fake


def test_what_the_device_does_is_timed_and_not_how_fast_the_host_asks_for_it(device):
    clock = EventClock(torch.device("cuda"))
    seconds, host = clock.time(lambda number: device.enqueue(10e-6), 0, 20)  # the host takes five times as long
    assert seconds == pytest.approx(10e-6, rel=1e-6)
    assert host == pytest.approx(50e-6, rel=1e-6)


def test_a_head_start_that_is_over_too_soon_is_made_longer(device):
    clock = EventClock(torch.device("cuda"))
    device.launch = 1e-3  # 20 calls take 20 ms, the first head start is 1 ms
    seconds, _ = clock.time(lambda number: device.enqueue(10e-6), 0, 20)
    assert seconds == pytest.approx(10e-6, rel=1e-6)
    assert max(device.spins) > 20e-3


def test_calls_that_wait_for_the_device_are_timed_all_the_same(device):
    clock = EventClock(torch.device("cuda"))

    def run(number):
        device.enqueue(10e-6)
        device.synchronize()

    seconds, _ = clock.time(run, 0, 4)
    assert seconds == pytest.approx(60e-6, rel=0.5)  # launch and work, one after the other
