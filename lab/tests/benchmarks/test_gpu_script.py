"""benchmarks/gpu.py without a GPU: its steps, their time limits, and what they import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .scripts import FOLDER, script


@pytest.fixture(scope="module")
def gpu():
    return script("gpu")


def test_the_limits_of_the_steps_add_up_to_nine_minutes(gpu, tmp_path):
    assert sum(step.limit for step in gpu.steps(tmp_path)) <= 540


@pytest.mark.slow
def test_the_programs_need_neither_tyro_nor_what_reads_data(gpu, tmp_path):
    """A small step on the CPU runs the code that a GPU would run."""
    python, path, *given = gpu.program("kv_shift", "--preset", "smoke", "--device", "cpu", "--rounds", "2")
    absent = "import runpy, sys\nfor name in ('tyro', 'datasets', 'ray', 'scipy'): sys.modules[name] = None\n"
    code = f"{absent}sys.path.insert(0, {str(FOLDER)!r})\nrunpy.run_path({path!r}, run_name='__main__')"
    command = [python, "-c", code, *given, "--out", str(tmp_path / "bench")]
    subprocess.run(command, check=True, capture_output=True, env=gpu.environment(), timeout=120)
    script("report")
    text = gpu.summary(tmp_path, [("op", "done", 3.0)])
    assert text.startswith("op ")
    assert "kv_shift" in text
    assert (tmp_path / "bench" / "plot.svg").exists()
    assert "## Operator" in (tmp_path / "bench" / "table.md").read_text()


def test_a_step_that_hangs_is_stopped_and_one_that_fails_is_named(gpu, tmp_path):
    def step(code):
        return gpu.Step("one", ((sys.executable, "-c", code),), 60)

    with (tmp_path / "log").open("w") as log:
        assert gpu.run(step("import time; time.sleep(60)"), 0.3, log) == "stopped after 0 s"
        assert gpu.run(step("raise SystemExit(3)"), 30, log) == "exit code 3"
        assert gpu.run(step("print('well')"), 30, log) == "done"
    assert "well" in (tmp_path / "log").read_text()


TESTS = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(40))
def test_number(number):
    assert number != 23, "twenty-three"

def test_skipped():
    pytest.skip("not here")
"""


@pytest.mark.slow
def test_tests_are_shared_among_processes_and_failures_printed_as_they_come(gpu, tmp_path, capsys):
    """Every test runs once, for any number of processes."""
    (tmp_path / "test_gpu_made_up.py").write_text(TESTS)
    step = gpu.sharded_tests(tmp_path, 60, 2, (str(tmp_path / "test_gpu_made_up.py"),))
    with (tmp_path / "log").open("w") as log:
        assert gpu.run(step, 60, log) == "exit code 1: 39 passed, 1 failed, 1 skipped"
    assert "test_number[23]: AssertionError: twenty-three" in capsys.readouterr().out
    results = gpu.complete_lines(tmp_path / "tests.jsonl")
    assert sorted(result["collected"] for result in results if "collected" in result) == [17, 24]
    assert len({result["test"] for result in results if "test" in result}) == 41
    assert "assert 23 != 23" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_killed_share_has_left_what_it_had(gpu, tmp_path, capsys):
    """One test passes, one fails, and the third hangs."""
    code = (
        "import sys, time; file = open(sys.argv[1], 'a'); file.write('{\"collected\": 3}\\n"
        '{"test": "a", "outcome": "passed"}\\n'
        '{"test": "b", "outcome": "failed", "problem": "wrong"}\\n{"test": \'); '
        "file.flush(); time.sleep(60)"
    )
    path = tmp_path / "tests.jsonl"
    step = gpu.Step("tests", ((sys.executable, "-c", code, str(path)),), 60, results=path)
    with (tmp_path / "log").open("w") as log:
        assert gpu.run(step, 3, log) == "stopped after 3 s: 1 passed, 1 failed, 1 not run"
    assert capsys.readouterr().out == "FAILED b: wrong\n"


def test_the_tests_of_the_first_step_are_those_for_a_gpu_in_many_processes(gpu, tmp_path):
    step = gpu.steps(tmp_path)[0]
    assert step.name == "tests"
    files = ("tests/models/test_gpu.py", *(f"tests/ops/test_gpu{name}.py" for name in ("", "_launches", "_programs")))
    assert set(files) <= set(step.commands[0])
    assert len(step.commands) == len(step.variables) == min(16, os.cpu_count() or 1)
