"""Kept launches are those that Triton would make, and mutants of what they are kept for are detected.

The checks are in `check_launches.py`, which launches compiled kernels through a stub of CUDA's driver.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..conftest import skip_unless_built

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "check_launches.py"


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    skip_unless_built("triton")
    pytest.importorskip("triton.backends.nvidia")
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_kept_launches_are_those_of_triton(outcomes):
    checks = {row["check"]: row["error"] for row in outcomes if "check" in row}
    assert len(checks) == 14
    assert set(checks.values()) == {None}, checks


def test_mutants_are_caught(outcomes):
    mutants = {row["mutant"]: row["error"] for row in outcomes if "mutant" in row}
    assert len(mutants) == 24
    assert not [name for name, error in mutants.items() if error is None]
