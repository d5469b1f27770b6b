"""A plugin of pytest: one process's share of the tests, each result told and written down as it comes.

    KVSHIFT_SHARD=2/16 KVSHIFT_SHARD_RESULTS=FILE python -m pytest -p tests.sharding ...

runs share 2 of 16, counted from 0. A process that is killed has told all its failures by then, and FILE, to which all
shares append JSON lines, holds what it had done. `benchmarks/gpu.py` starts them; it needs no pytest-xdist.
"""

from __future__ import annotations

import json
import os

import pytest

_TOGETHER = 8  # consecutive tests that stay in one process: mostly they need the same kernels, compiled once


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the other shares out."""
    share, shares = map(int, os.environ["KVSHIFT_SHARD"].split("/"))
    mine = [item for number, item in enumerate(items) if number // _TOGETHER % shares == share]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """How many tests this share has, once markers and shares are sorted out."""
    _write(collected=len(session.items))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be collected is a failure, too."""
    if report.failed:
        _write(test=report.nodeid, outcome="failed", problem=_error(report.longreprtext))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test; for one that failed, all that pytest has to say of it."""
    if report.failed:
        print(f"\n{report.nodeid} FAILED ({report.when})\n{report.longreprtext}", flush=True)
        _write(test=report.nodeid, outcome="failed", problem=_error(report.longreprtext))
    elif report.skipped or report.when == "call":
        _write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3))


def _error(text: str) -> str:
    """Of what pytest says of a failure: the first line of the error."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (errors or text.strip().splitlines() or [""])[0][:300]


def _write(**values: object) -> None:
    with open(os.environ["KVSHIFT_SHARD_RESULTS"], "ab", buffering=0) as file:  # a write of one line is not split
        file.write(json.dumps(values).encode() + b"\n")
