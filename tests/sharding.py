"""A pytest plugin that runs one process's share of the tests and reports each result as soon as it is known.

    KVSHIFT_SHARD=2/16 KVSHIFT_SHARD_RESULTS=FILE python -m pytest -p tests.sharding ...

runs share 2 of 16, counted from 0. All shares append JSON lines to FILE, so the results of a process that is killed
are not lost; its failures have been printed by then. `benchmarks/gpu.py` starts the shares; pytest-xdist is not needed.
"""

from __future__ import annotations

import json
import os

import pytest

_TOGETHER = 8  # consecutive tests stay in one process: most of them need the same kernels, which are compiled once


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other shares."""
    share, shares = map(int, os.environ["KVSHIFT_SHARD"].split("/"))
    mine = [item for number, item in enumerate(items) if number // _TOGETHER % shares == share]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the number of tests of this share, after deselection by markers and shares."""
    _write(collected=len(session.items))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be collected as a failure."""
    if report.failed:
        _write(test=report.nodeid, outcome="failed", problem=_error(report.longreprtext))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a line for each test; if it failed, also print pytest's whole report."""
    if report.failed:
        print(f"\n{report.nodeid} FAILED ({report.when})\n{report.longreprtext}", flush=True)
        _write(test=report.nodeid, outcome="failed", problem=_error(report.longreprtext))
    elif report.skipped or report.when == "call":
        _write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3))


def _error(text: str) -> str:
    """Return the first line of the error in pytest's report of a failure."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (errors or text.strip().splitlines() or [""])[0][:300]


def _write(**values: object) -> None:
    with open(os.environ["KVSHIFT_SHARD_RESULTS"], "ab", buffering=0) as file:  # writing a single line is atomic
        file.write(json.dumps(values).encode() + b"\n")
