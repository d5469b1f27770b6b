"""`kvshift doctor` on the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvshift
from kvshift.ops import dispatch, shift
from kvshift.ops.cpu import kernel as cpu_kernel
from kvshift_lab.cli import main
from kvshift_lab.doctor import doctor as doctor_module
from tests.ops.conftest import skip_unless_built
from tests.ops.triton.test_mutants import MUTANTS

PARTS = ["versions", "environment", "devices", "kernels", "backends", "edge suite", "wrong"]


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off Triton's interpreter, which is slow and not in use on users' machines."""
    monkeypatch.setattr("kvshift.ops.triton.call._IS_INTERPRETED", False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check only two dtypes, in tests that are not about the results."""
    monkeypatch.setattr(doctor_module, "_DTYPES", ("float32", "bfloat16"))


def report(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert main(["doctor", "--json", *arguments]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_it_finds_nothing_wrong_here(capsys, no_interpreter):
    skip_unless_built("cpu")
    assert main(["doctor"]) == 0
    printed, said = capsys.readouterr()
    assert said == ""
    assert re.findall(r"^(\S.*)$", printed, re.MULTILINE) == PARTS
    assert f"torch         {torch.__version__}" in printed
    assert "cpu kernel     built, and it loads" in printed
    assert re.search(r"cpu +kv_shift +float32, bfloat16, float16, float64 +cpu +its kernels can", printed)
    assert re.search(r"cpu +attention, next token +float32.* plain operations +preparing a kernel launch", printed)
    assert len(re.findall(r"^  cpu +(?:cpu|eager) +float.* 15 of 15$", printed, re.MULTILINE)) == 8
    assert printed.endswith("wrong\n  nothing\n\n")


def test_json_holds_the_same_parts(capsys, no_interpreter, few):
    found = report(capsys, "--device", "cpu")
    assert list(found) == PARTS
    assert found["wrong"] == []
    assert {row["backend"] for row in found["edge suite"]} <= {"cpu", "eager"}
    assert found["versions"]["torch"] == torch.__version__


def test_why_the_cpu_kernel_is_missing(capsys, no_interpreter, few, monkeypatch, tmp_path):
    """The reason is given in the words of the compiler that failed."""
    (tmp_path / "_kernel.build.txt").write_text("g++ failed; its last lines:\nkernel.cpp:3: error: no\n")
    monkeypatch.setattr(cpu_kernel, "__file__", str(tmp_path / "kernel.py"))
    cpu_kernel._kernels.cache_clear()
    found = report(capsys)
    cpu_kernel._kernels.cache_clear()
    missing = found["kernels"]["cpu kernel"]
    assert re.fullmatch(r"missing: _kernel\S+ was not built .*\ng\+\+ failed; .*:\nkernel.cpp:3: error: no", missing)
    assert found["backends"][0]["backend"] == "eager"
    assert "was not built" in found["backends"][0]["why"]
    assert [row["backend"] for row in found["edge suite"]] == ["eager"] * 3


def test_a_kernel_that_is_wrong_is_named(capsys, no_interpreter, few, monkeypatch):
    skip_unless_built("cpu")
    right = shift.shift_cpu

    def without_state(x, coefficients, state, plan):
        return right(x, coefficients, torch.zeros_like(state), plan)

    monkeypatch.setattr(shift, "shift_cpu", without_state)
    assert main(["doctor"]) == 1
    printed, said = capsys.readouterr()
    assert re.search(
        r"^  edge suite: cpu on cpu, float32, .*, state: k: \d+ of \d+ elements are off", printed, re.MULTILINE
    )
    assert re.search(r"^  edge suite: cpu on cpu, bfloat16, .*, every split: pieces of", printed, re.MULTILINE)
    assert "eager on cpu, " not in printed
    assert re.fullmatch(r"kvshift doctor: faults found: \d+; please report this output at .*issues\n", said)


def test_a_backend_that_raises_is_a_line(capsys, no_interpreter, few, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no kernel image is available\nfor execution")

    monkeypatch.setattr(shift, "shift_eager", fails)
    wrong = report(capsys, code=1)["wrong"]
    assert len(wrong) == 3
    assert re.fullmatch(
        r"edge suite: eager on cpu, .*, first token, .*: RuntimeError: no kernel image is available", wrong[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lags swapped", "padding written", "norm's gradient without its mean"])
def test_a_mutant_of_the_triton_kernels_is_named(name, capsys, monkeypatch, tmp_path):
    skip_unless_built("triton")
    monkeypatch.setattr(doctor_module, "_DTYPES", ("float32",))
    with MUTANTS[name].in_place(tmp_path):
        wrong = report(capsys, code=1)["wrong"]
    assert wrong
    assert all(line.startswith("edge suite: triton on cpu, ") for line in wrong)


@pytest.mark.parametrize("fault", ['raise OSError("libcudart.so.13: no such file")', "import no_such_module", "1 / 0"])
def test_a_torch_that_cannot_be_imported_is_a_line(fault, tmp_path):
    (tmp_path / "torch.py").write_text(fault)
    path = os.pathsep.join(
        [str(tmp_path), str(Path(doctor_module.__file__).parents[2]), str(Path(kvshift.__file__).parents[1])]
    )
    program = [sys.executable, "-m", "kvshift_lab", "doctor"]
    done = subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert len(re.findall(r"^  (?:devices|kernels|backends|edge suite): \w+Error: ", done.stdout, re.MULTILINE)) == 4
    assert done.stdout.startswith("versions\n  kvshift ")


@pytest.mark.parametrize("device", ["cdua", "cuda:99", "meta:x"])
def test_a_device_that_is_not_there_is_refused_by_name(device, capsys):
    assert main(["doctor", "--device", device]) == 2
    assert f"device must exist on this machine, got '{device}': " in capsys.readouterr().err


def test_a_backend_of_the_environment_is_the_reason(capsys, no_interpreter, few, monkeypatch):
    monkeypatch.setenv("KVSHIFT_BACKEND", "eager")
    monkeypatch.setattr(dispatch, "_AUTO", "eager")
    found = report(capsys)
    assert found["environment"]["KVSHIFT_BACKEND"] == "eager"
    assert {(row["backend"], row["why"]) for row in found["backends"]} == {("eager", "KVSHIFT_BACKEND=eager")}
