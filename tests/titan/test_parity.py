"""A step of torchtitan on 2 and 4 processes: every gradient is that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..worker_processes import run_workers
from .parity_worker import CASES, CONTIGUOUS, HEAD_TAIL, SABOTAGE
from .test_checkpoints import address


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Of all cases: one start of processes for each number of them."""
    folder = tmp_path_factory.mktemp("parity")
    for processes in CASES:
        arguments = ["-W", "ignore", "-m", "tests.titan.parity_worker", str(folder)]
        run_workers(processes, arguments, timeout=900, **address())
    return {size: json.loads(Path(folder, f"found-{size}.json").read_text()) for size in CASES}


@pytest.mark.parametrize(("size", "case"), [(size, case) for size in (2, 4) for case in CASES[size]])
def test_gradients(results: dict, size: int, case: str):
    value, tolerance, where = results[size]["found"][case]
    assert value < tolerance, f"{case}: relative difference {value:.1e} in {where}"


@pytest.mark.parametrize("layout", [HEAD_TAIL, CONTIGUOUS], ids=["headtail", "contiguous"])
@pytest.mark.parametrize("sabotage", [sabotage.__name__ for sabotage in SABOTAGE])
def test_sabotage_is_caught(results: dict, sabotage: str, layout: dict):
    assert results[2]["broken"][f"{sabotage}, {layout['context_parallel_load_balancer']}"] > 1e-2
