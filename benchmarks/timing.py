"""What the benchmarks share: implementations of one thing take turns, and each becomes a row in OUT/rows.jsonl.

All implementations of a case run in this process, one after the other in each round, the baseline first. A time is the
median over rounds with its quartiles, and "ratio" the median of the ratios to the baseline in the same round. A row
names its baseline, the options, commit, versions and hardware. Rows are written when their case is done; the same
command measures only the missing cases, and refuses a file whose rows of that part are of other options or another
commit or machine. `python benchmarks/report.py OUT` makes a table and a plot of them.

On CUDA, operator and layer are timed by the device, which spins until all calls of a turn are queued; the time that the
host takes to issue them is in "host_milliseconds". Everything else is timed by the wall clock, as a user waits.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from allocated import peak_bytes

from kvshift.ops.cpu.kernel import cpu_unsupported_reason
from kvshift_lab.allocator import retain_freed_memory
from kvshift_lab.core.environment import environment, installed_versions
from kvshift_lab.core.json_lines import read_lines, write_lines
from kvshift_lab.core.options import digest
from kvshift_lab.core.timing import EventClock, Times, WallClock, describe, measure, quartiles, ratios

Row = dict[str, Any]


class LeftOutError(Exception):
    """Raised if an implementation cannot run on this machine or with these options; its row gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One implementation of a case.

    Attributes:
        run: executes one call; the number chooses among sets of inputs. None: memory is measured, but not time.
        check: returns the worst error against the reference, or raises an ArithmeticError: then it is not timed.
        moved_bytes: minimum number of bytes that a call must read and write; 0: unknown.
        per_call: number of units in a call, such as tokens, by which its time is divided.
        resident_bytes: bytes of weights and optimizer that are allocated all the time.
        saved: returns the number of bytes saved for the backward pass.
        facts: further fields of its row.
    """

    run: Callable[[int], object] | None
    check: Callable[[], float] | None = None
    moved_bytes: int = 0
    per_call: int = 1
    resident_bytes: int = 0
    saved: Callable[[], int] | None = None
    facts: Mapping[str, Any] | None = None


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--preset", choices=("smoke", "laptop", "paper"), default="laptop", help="size of the cases")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=positive, help="rounds of each case (default: those of the preset)")
    parser.add_argument("--no-compile", action="store_false", dest="compile", help="leave out torch.compile")
    parser.add_argument(
        "--cases", nargs="+", default=[], metavar="TEXT", help="only cases whose names contain all of these"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of rows.jsonl")
    return parser


def positive(text: str) -> int:
    """Return a number of an option that must be 1 or more."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text}")
    return int(text)


class Benchmark:
    """The cases of one program.

    Attributes:
        device: device that is measured.
        compiled: whether torch.compile is measured.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        if options.device == "cuda" and not torch.cuda.is_available():
            sys.exit("--device is cuda, but PyTorch finds no CUDA device here; give cpu")
        self.device = torch.device(options.device)
        self.compiled = options.compile and options.preset != "smoke"
        self._chosen: list[str] = options.cases
        self._path: Path = options.out / "rows.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = list(read_lines(self._path)) if self._path.exists() else []
        on_gpu = self.device.type == "cuda"
        wall = WallClock((lambda: torch.cuda.synchronize(self.device)) if on_gpu else lambda: None)
        self._clocks = {False: wall, True: EventClock(self.device) if on_gpu else wall}
        self._stamp = _stamp(options, self.device)

    def case(
        self,
        part: str,
        name: str,
        implementations: Callable[[], Mapping[str, Callable[[], Implementation]]],
        *,
        rounds: int,
        device_time: bool = False,
        **facts: Any,
    ) -> None:
        """Measure the implementations of one case, if it is asked for and its rows are not there yet.

        Args:
            part, name: part of the benchmark, and name of the case, unique within it.
            implementations: returns a function for each implementation that makes it, the baseline first. One that
                fails is recorded as failed; the others are measured.
            rounds: number of rounds after the warm-up.
            device_time: count the time that a GPU works, not the time that a user waits.
            facts: further fields of the rows.
        """
        there = [row for row in self._rows if row["part"] == part]
        for row in there:
            for field in ("options", "commit", "versions", "hardware"):
                if row[field] != self._stamp[field]:
                    sys.exit(f"{self._path} has rows with other {field}: {row[field]}; give another --out")
        chosen = all(text in name for text in self._chosen)
        if not chosen or any(row["case"] == name for row in there):
            return
        print(f"{part}: {name}", file=sys.stderr, flush=True)
        torch.compiler.reset()  # torch.compile stops compiling a code object after a few shapes
        makes = dict(implementations())
        shared = {"part": part, "case": name, "baseline": next(iter(makes)), **facts}
        found = measure_case(makes, self._clocks[device_time], rounds, self.device)
        self._rows += [{**shared, **row, **self._stamp} for row in found]
        write_lines(self._path, self._rows)
        del makes
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def finish(self) -> None:
        """Say where the rows are. Exit with an error if an implementation failed or was wrong, now or earlier."""
        print(self._path.resolve())
        failed = [row for row in self._rows if "problem" in row]
        if failed:
            sys.exit("\n".join("{part}, {case}, {contestant}: {problem}".format(**row) for row in failed))


def measure_case(
    makes: Mapping[str, Callable[[], Implementation]], clock: Any, rounds: int, device: torch.device
) -> list[Row]:
    """Return a row for each implementation, in order; ratios are to the first."""
    works: dict[str, Implementation] = {}
    rows: dict[str, Row] = {}
    for name, make in makes.items():
        row = rows[name] = {"contestant": name}
        try:
            work = make()
            row |= work.facts or {}
            if work.check is not None:
                row["worst_error"] = work.check()
            if work.run is not None:
                work.run(0)
            works[name] = work
        except LeftOutError as reason:
            row["left_out"] = str(reason)
        except ArithmeticError as error:
            row["problem"] = f"parity failed: {error}"
        except Exception as error:  # whatever the error, the other implementations are measured
            row["problem"] = f"failed: {describe(error)}"
    timed = {name: work.run for name, work in works.items() if work.run is not None}
    times = measure(timed, clock, rounds) if timed else {}
    baseline = next(iter(makes))
    for name, work in works.items():
        row = rows[name]
        try:
            if name in times:
                if times[name].failure is not None:
                    row["problem"] = f"failed: {times[name].failure}"
                    continue
                row |= _time(work, times[name], times.get(baseline))
            row |= _memory(work, device)
        except Exception as error:
            row["problem"] = f"failed: {describe(error)}"
            continue
        for field, relative, less in (
            ("gb_per_second", "of_copy", 0),
            ("saved_bytes", "saved_more", 1),
            ("peak_bytes", "peak_more", 1),
        ):
            if field in row and rows[baseline].get(field):
                row[relative] = row[field] / rows[baseline][field] - less
    return list(rows.values())


def _time(work: Implementation, times: Times, baseline: Times | None) -> Row:
    each = quartiles([1e3 * seconds / work.per_call for seconds in times.seconds])
    row: Row = {
        "milliseconds": each.median,
        "milliseconds_low": each.low,
        "milliseconds_high": each.high,
        "rounds": len(times.seconds),
        "calls_per_turn": times.calls,
    }
    if times.host:
        row["host_milliseconds"] = 1e3 * quartiles(times.host).median / work.per_call
    if baseline is not None and baseline.failure is None:
        ratio = ratios(times, baseline)
        row |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
    if work.moved_bytes:
        row["moved_bytes"] = work.moved_bytes
        row["gb_per_second"] = work.moved_bytes / quartiles(times.seconds).median / 1e9
    return row


def _memory(work: Implementation, device: torch.device) -> Row:
    row: Row = {}
    if work.saved is not None:
        row["saved_bytes"] = work.saved()
    if work.run is not None:
        row["peak_bytes"] = work.resident_bytes + peak_bytes(functools.partial(work.run, 0), device)
    return row


def _stamp(options: argparse.Namespace, device: torch.device) -> Row:
    """Return the fields of every row: the options that affect numbers, and where it was measured."""
    found = environment(device, 1)
    given = {name: value for name, value in vars(options).items() if name not in ("cases", "device", "out", "parts")}
    # As PyTorch's guide for CPUs advises: new pages cost more than the measured operations.
    given["memory_kept"] = device.type == "cpu" and retain_freed_memory()
    given["backend"] = os.environ.get("KVSHIFT_BACKEND", "auto")
    refusal = cpu_unsupported_reason(torch.empty(0), 2)
    return {
        "options": given,
        "config_hash": digest(given),
        "started": found["started"],
        "commit": found["commit"],
        "versions": {**found["versions"], **installed_versions(["triton"])},
        "hardware": {**found["hardware"], "cpu_kernel": refusal or "built"},
        "platform": found["platform"],
    }
