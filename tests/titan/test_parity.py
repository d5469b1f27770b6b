"""Every gradient of a torchtitan step on 2 or 4 processes equals that of a single process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..worker_processes import fork_workers
from . import parity_worker
from .parity_worker import BROKEN, CASES, SABOTAGE
from .test_checkpoints import address
from .tiny import ROWS


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Results of all cases, by number of processes; processes are started once for each number."""
    folder = tmp_path_factory.mktemp("parity")
    for processes in CASES:
        print(*fork_workers(processes, parity_worker.main, folder, timeout=900, **address()), sep="\n")
    return {size: json.loads(Path(folder, f"found-{size}.json").read_text()) for size in CASES}


@pytest.mark.parametrize(("size", "case"), [(size, case) for size in (2, 4) for case in CASES[size]])
def test_gradients(results: dict, size: int, case: str):
    value, where, tolerance = results[size]["found"][case]
    assert value < tolerance, f"{case}: relative difference {value:.1e} in {where}"


@pytest.mark.parametrize(("size", "case"), BROKEN)
@pytest.mark.parametrize("sabotage", [sabotage.__name__ for sabotage in SABOTAGE])
def test_sabotage_is_caught(results: dict, sabotage: str, size: int, case: str):
    assert results[size]["broken"][case][sabotage] > 1e-2


@pytest.mark.parametrize(("size", "case"), BROKEN)
def test_after_sabotage_it_is_right_again(results: dict, size: int, case: str):
    assert results[size]["broken"][case]["nothing"] < 1e-10


def test_the_shift_sends_to_neighbours_alone(results: dict):
    """In each layer the shift sends one token per row to each neighbour, while attention gathers from all other ranks.

    Backward sends as much.
    """
    layers, (rank, ranks) = 2, (1, 4)
    heads, head_size, length, float64 = 2, 8, 512, 8
    both = 2 * heads * head_size * float64  # keys and values of a token
    traffic = results[ranks]["traffic"]["CP 4 head-tail"][rank]
    assert traffic["sent"] == [ROWS * both] * layers * 2  # one token per row to each of two neighbours
    assert traffic["gathered"] == [ROWS * (length - length // ranks) * both] * layers
