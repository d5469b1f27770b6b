"""Step times of functions that are measured side by side."""

import pytest

from kvshift_lab.commands.compare.step_time import side_by_side
from kvshift_lab.core.errors import RunFailedError
from kvshift_lab.core.timing import WallClock


class Clock:
    """A clock that only the steps advance."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def step(self, name, seconds):
        def run(_):
            self.calls.append(name)
            self.now += seconds(self.now) if callable(seconds) else seconds

        return run

    def __call__(self):
        return self.now


def test_ratio_of_two_steps():
    clock = Clock()
    steps = {"vanilla": clock.step("vanilla", 0.08), "shifted": clock.step("shifted", 0.1)}
    found = side_by_side(steps, WallClock(now=clock), 10.0)
    assert found["ratios"] == {"shifted": pytest.approx({"low": 1.25, "ratio": 1.25, "high": 1.25})}
    assert found["milliseconds"] == {"vanilla": pytest.approx(80), "shifted": pytest.approx(100)}
    assert found["steps_per_turn"] == 2  # about 0.15 seconds
    assert found["rounds"] == -(-10.0 // (2 * 2 * 0.18))


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    clock = Clock()
    slower = {"vanilla": lambda now: 0.1 * (1 + now / 20), "shifted": lambda now: 0.125 * (1 + now / 20)}
    steps = {name: clock.step(name, seconds) for name, seconds in slower.items()}
    found = side_by_side(steps, WallClock(now=clock), 20.0)
    assert found["ratios"]["shifted"]["ratio"] == pytest.approx(1.25, rel=0.001)
    # Measured one after the other, as in two separate runs, the second would seem twice as slow.
    assert found["milliseconds"]["shifted"] > 1.3 * 125


def test_rounds_are_mirrored_and_of_three_each_has_its_ratio_to_the_first():
    clock = Clock()
    steps = {name: clock.step(name, seconds) for name, seconds in (("v", 1.0), ("s", 3.0), ("m", 2.0))}
    found = side_by_side(steps, WallClock(now=clock), 0.0)
    assert {name: ratio["ratio"] for name, ratio in found["ratios"].items()} == pytest.approx({"s": 3.0, "m": 2.0})
    assert found["rounds"] == 5
    assert "".join(clock.calls) == "vsmvsm" + 5 * "vsmmsv"  # warm-up, then the rounds


def test_it_waits_for_the_device():
    clock = Clock()
    queued = []
    steps = {"vanilla": lambda _: queued.append(1.0), "shifted": lambda _: queued.append(2.0)}

    def wait():
        clock.now += sum(queued)
        queued.clear()

    assert side_by_side(steps, WallClock(wait, clock), 0.0)["ratios"]["shifted"]["ratio"] == 2.0


def test_a_step_that_fails_is_named():
    def fails(_):
        raise MemoryError("none left")

    with pytest.raises(RunFailedError, match="a step of shifted could not be timed: MemoryError: none left"):
        side_by_side({"vanilla": lambda _: None, "shifted": fails}, WallClock(), 0.0)
