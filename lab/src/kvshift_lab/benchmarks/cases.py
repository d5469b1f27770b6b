"""Cases, in which implementations are measured side by side, and the rows that they give."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvshift_lab.benchmarks.peak import peak_bytes
from kvshift_lab.benchmarks.presets import Preset
from kvshift_lab.core.timing import Clock, Times, describe, measure, quartiles, ratios

Row = dict[str, Any]


class LeftOutError(Exception):
    """Raised if an implementation cannot run on this machine or with these options; its row gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """The settings that all cases of a benchmark run share.

    Attributes:
        rounds, model_rounds: number of measured rounds.
        compiled: whether torch.compile is measured.
        layers: depth of a model that is otherwise made as deep as fits; None: as many layers as fit.
        device_clock: measures how long the device works.
        wall_clock: measures how long a user waits.
        log: called with a text that names the case being measured.
    """

    device: torch.device
    preset: Preset
    rounds: int
    model_rounds: int
    compiled: bool
    layers: int | None
    device_clock: Clock
    wall_clock: Clock
    log: Callable[[str], object] = lambda text: None


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One implementation.

    Attributes:
        run: executes one call; the number chooses among sets of inputs. None: memory is measured, but not time.
        check: compares the implementation with the reference before it is timed; "problem" describes a mismatch, or is
            None; all other items go into the row.
        moved_bytes: minimum number of bytes that a call must read and write; 0: unknown.
        per_call: number of units in a call, such as tokens, by which its time is divided.
        resident_bytes: bytes of weights and optimizer that are allocated all the time.
        saved: returns the number of bytes saved for the backward pass.
        facts: further fields of its row.
    """

    run: Callable[[int], object] | None
    check: Callable[[], Mapping[str, Any]] | None = None
    moved_bytes: int = 0
    per_call: int = 1
    resident_bytes: int = 0
    saved: Callable[[], int] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Implementations that are measured side by side.

    Attributes:
        part: part of the benchmark.
        name: name of the case, unique within its part.
        baseline: name of the implementation that ratios are relative to.
        build: returns a function for each implementation that makes it: if one cannot be made, it is recorded as failed
            and the others are measured.
        facts: fields that all rows share.
        clock: clock for all implementations.
        rounds: number of measured rounds.
    """

    part: str
    name: str
    baseline: str
    build: Callable[[], Mapping[str, Callable[[], Implementation]]]
    facts: Mapping[str, Any]
    clock: Clock
    rounds: int


def measure_case(case: Case, device: torch.device) -> list[Row]:
    """Return a row for each implementation, in order. A failure is recorded in its row and does not stop the others."""
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
        except Exception as error:  # whatever the error, the other implementations are measured
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
            row |= _memory(implementation, device)
        except Exception as error:
            row["problem"] = f"failed: {describe(error)}"
    for row in found.values():
        row |= _relative_to(found.get(case.baseline, {}), row)
    implementations.clear()
    timed.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return list(found.values())


def _timing(implementation: Implementation, times: Times, baseline: Times | None) -> Row:
    """Return milliseconds, their ratios to the baseline in the same round, and GB/s for the bytes that must move."""
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
    if implementation.moved_bytes:
        row["moved_bytes"] = implementation.moved_bytes
        row["gb_per_second"] = implementation.moved_bytes / quartiles(times.seconds).median / 1e9
    return row


def _relative_to(baseline: Row, row: Row) -> Row:
    """Return bandwidth / baseline, and (bytes / baseline - 1) of the saved and the peak bytes."""
    found: Row = {}
    for name, relative, less in (
        ("gb_per_second", "of_copy", 0),
        ("saved_bytes", "saved_more", 1),
        ("peak_bytes", "peak_more", 1),
    ):
        if name in row and baseline.get(name):
            found[relative] = row[name] / baseline[name] - less
    return found


def _memory(implementation: Implementation, device: torch.device) -> Row:
    row: Row = {}
    if implementation.saved is not None:
        row["saved_bytes"] = implementation.saved()
    if implementation.run is not None:
        row["peak_bytes"] = implementation.resident_bytes + peak_bytes(functools.partial(implementation.run, 0), device)
    return row
