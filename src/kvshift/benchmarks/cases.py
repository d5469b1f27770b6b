"""A case: implementations that are measured side by side, and the records that they give."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvshift.benchmarks.peak import peak_bytes
from kvshift.benchmarks.presets import Preset
from kvshift.lab.compare.timing import Clock, Times, describe, measure, quartiles, ratios

Row = dict[str, Any]


class LeftOutError(Exception):
    """Why an implementation takes no part on this machine, or with these options; its row says so."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all cases of a call share.

    Attributes:
        rounds, model_rounds: how many count.
        compiled: whether torch.compile takes part.
        layers: of a model that is made as deep as fits; None: as many as fit.
        device_clock: how long the device works.
        wall_clock: how long a user waits.
        say: is told of what is being measured.
    """

    device: torch.device
    preset: Preset
    rounds: int
    model_rounds: int
    compiled: bool
    layers: int | None
    device_clock: Clock
    wall_clock: Clock
    say: Callable[[str], object] = lambda text: None


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One path.

    Attributes:
        run: one call; the number chooses among sets of inputs. None: its memory is counted, its time is not taken.
        check: compares the path with the reference before it is timed; "problem" says what is off, None that nothing
            is; what else it returns goes into the row.
        moved: bytes that a call must read and write at the least; 0: not said.
        per_call: things done in a call, such as tokens, by which its time is divided.
        resident: bytes of weights and optimizer that are there all the time.
        saved: counts the bytes that it keeps for backward.
        facts: what else its row says.
    """

    run: Callable[[int], object] | None
    check: Callable[[], Mapping[str, Any]] | None = None
    moved: int = 0
    per_call: int = 1
    resident: int = 0
    saved: Callable[[], int] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Implementations side by side.

    Attributes:
        part: of the benchmark.
        name: once in a part.
        baseline: the implementation whose time is 1.
        build: makes the implementations, each by a function of its own: one that cannot be made is said to fail, and
            the others are measured.
        facts: what each row says.
        clock: of all implementations.
        rounds: that count.
    """

    part: str
    name: str
    baseline: str
    build: Callable[[], Mapping[str, Callable[[], Implementation]]]
    facts: Mapping[str, Any]
    clock: Clock
    rounds: int


def measure_case(case: Case, device: torch.device) -> list[Row]:
    """A row for each implementation, in their order. No implementation ends another, and none goes unsaid."""
    implementations: dict[str, Implementation] = {}
    found: dict[str, Row] = {}
    for name, make in case.build().items():
        row = found[name] = {"part": case.part, "case": case.name, "contestant": name, **case.facts}
        try:
            implementation = make()
            row |= implementation.facts
            verdict = {} if implementation.check is None else dict(implementation.check())
            problem = verdict.pop("problem", None)
            row |= verdict
            if problem:
                row["problem"] = f"parity failed: {problem}"
                continue
            if implementation.run is not None:
                implementation.run(0)
        except LeftOutError as reason:
            row["left_out"] = str(reason)
            continue
        except Exception as error:  # whatever it is, the other rows are measured
            row["problem"] = f"failed: {describe(error)}"
            continue
        implementations[name] = implementation
    timed = {
        name: implementation.run for name, implementation in implementations.items() if implementation.run is not None
    }
    times = measure(timed, case.clock, case.rounds) if timed else {}
    for name, implementation in implementations.items():
        row = found[name]
        try:
            if name in times:
                if times[name].failure is not None:
                    row["problem"] = f"failed: {times[name].failure}"
                    continue
                row |= _timing(implementation, times[name], times.get(case.baseline))
                row |= _bandwidth(
                    implementation, times[name], implementations.get(case.baseline), times.get(case.baseline)
                )
            row |= _memory(implementation, device)
        except Exception as error:
            row["problem"] = f"failed: {describe(error)}"
    _compare_memory(list(found.values()), found.get(case.baseline, {}))
    implementations.clear()
    timed.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return list(found.values())


def _timing(implementation: Implementation, times: Times, baseline: Times | None) -> Row:
    """Milliseconds, and multiples of the baseline round by round; each a median between its quartiles."""
    each = quartiles([1e3 * seconds / implementation.per_call for seconds in times.seconds])
    row: Row = {
        "milliseconds": each.median,
        "milliseconds_low": each.low,
        "milliseconds_high": each.high,
        "rounds": len(times.seconds),
        "calls_per_turn": times.calls,
    }
    if times.host:
        row["host_milliseconds"] = 1e3 * quartiles(times.host).median / implementation.per_call
    if baseline is not None and baseline.failure is None:
        ratio = ratios(times, baseline)
        row |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return row


def _bandwidth(implementation: Implementation, times: Times, copy: Implementation | None, copied: Times | None) -> Row:
    """GB/s of the bytes that must move, and what part of the baseline's that is, where the baseline moves bytes."""
    if not implementation.moved:
        return {}
    speed = implementation.moved / quartiles(times.seconds).median / 1e9
    row: Row = {"moved_bytes": implementation.moved, "gb_per_second": speed}
    if copy is not None and copy.moved and copied is not None and copied.failure is None:
        row["of_copy"] = speed / (copy.moved / quartiles(copied.seconds).median / 1e9)
    return row


def _compare_memory(rows: list[Row], baseline: Row) -> None:
    """Beside the baseline's, as a part of it, where it has some."""
    for name in ("saved", "peak"):
        base = baseline.get(f"{name}_bytes")
        for row in rows:
            if base and f"{name}_bytes" in row:
                row[f"{name}_more"] = row[f"{name}_bytes"] / base - 1


def _memory(implementation: Implementation, device: torch.device) -> Row:
    row: Row = {}
    if implementation.saved is not None:
        row["saved_bytes"] = implementation.saved()
    if implementation.run is not None:
        row["peak_bytes"] = implementation.resident + peak_bytes(functools.partial(implementation.run, 0), device)
    return row
