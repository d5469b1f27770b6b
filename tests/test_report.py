"""`python -m kvshift`: the report on an installation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvshift
from kvshift import __main__ as report
from kvshift.ops import comparison, dispatch, shift
from kvshift.ops.cpu import kernel as cpu_kernel

from .ops.conftest import skip_unless_built

PARTS = ["versions", "environment", "devices", "backends"]


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off Triton's interpreter, which is slow and not in use on users' machines."""
    monkeypatch.setattr("kvshift.ops.triton.call._IS_INTERPRETED", False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def parts(printed: str) -> dict[str, list[str]]:
    blocks = re.split(r"^(?=\S)", printed, flags=re.MULTILINE)[1:]
    return {block.splitlines()[0]: [line.strip() for line in block.splitlines()[1:]] for block in blocks}


def test_it_names_versions_and_what_each_call_takes(capsys, no_interpreter, monkeypatch):
    skip_unless_built("cpu")
    monkeypatch.setenv("KVSHIFT_ANYTHING", "1")
    assert report.main([]) == 0
    printed, errors = capsys.readouterr()
    found = parts(printed)
    assert (list(found), errors) == (PARTS, "")
    assert f"kvshift {kvshift.__version__}, {Path(kvshift.__file__).parent}" in found["versions"]
    assert f"torch {torch.__version__}" in found["versions"]
    assert "KVSHIFT_ANYTHING=1" in found["environment"]
    assert "cpu: the kernel was built, and it loads" in found["devices"]
    assert found["backends"][0] == "cpu, kv_shift, float32, bfloat16, float16, float64: cpu"
    *_, in_one_call, by_operations = (
        line for line in found["backends"] if line.startswith("cpu, attention for the next")
    )
    assert re.search(r"float32, bfloat16, float16: one call of the compiled kernel in models of", in_one_call)
    assert re.search(r"float64: a few plain operations, because", by_operations)


def test_the_test_finds_nothing_wrong_here(capsys, no_interpreter):
    skip_unless_built("cpu")
    assert report.main(["--test"]) == 0
    lines = parts(capsys.readouterr().out)["comparison with the reference"]
    assert lines == [f"{backend} on cpu, {dtype}: right" for backend in ("cpu", "eager") for dtype in report._DTYPES]


def test_why_the_cpu_kernel_is_missing(capsys, no_interpreter, monkeypatch, tmp_path):
    """The reason is given in the words of the compiler that failed."""
    (tmp_path / "_kernel.build.txt").write_text("g++ failed; its last lines:\nkernel.cpp:3: error: no\n")
    monkeypatch.setattr(cpu_kernel, "__file__", str(tmp_path / "kernel.py"))
    cpu_kernel._kernels.cache_clear()
    try:
        assert report.main([]) == 0
    finally:
        monkeypatch.undo()
        cpu_kernel._kernels.cache_clear()
    found = parts(capsys.readouterr().out)
    assert re.match(r"cpu: _kernel\S+ was not built", found["devices"][1])
    assert found["devices"][2:4] == ["g++ failed; its last lines:", "kernel.cpp:3: error: no"]
    assert re.match(r"cpu, kv_shift, float32.*: eager, because of the kernels: .* was not built", found["backends"][0])


def test_a_backend_of_the_environment_is_the_reason(capsys, no_interpreter, monkeypatch):
    monkeypatch.setattr(dispatch, "_AUTO", "eager")
    assert report.main([]) == 0
    lines = parts(capsys.readouterr().out)["backends"]
    assert [line.partition(": ")[2] for line in lines] == ["eager, because of KVSHIFT_BACKEND=eager"] * 3


def test_a_kernel_that_is_wrong_is_named(capsys, no_interpreter, monkeypatch):
    skip_unless_built("cpu")
    monkeypatch.setattr(comparison, "_DTYPES", (torch.float32,))
    right = shift.shift_cpu
    monkeypatch.setattr(shift, "shift_cpu", lambda x, c, state, plan: right(x, c, torch.zeros_like(state), plan))
    assert report.main(["--test"]) == 1
    wrong, fine, total = parts(capsys.readouterr().out)["comparison with the reference"]
    assert re.match(r"cpu on cpu, float32: sequences, training: k: Tensor-likes are not close! Mismatched", wrong)
    assert fine == "eager on cpu, float32: right"
    assert re.match(r"AssertionError: \d calls were wrong", total)


def test_a_backend_that_raises_is_named(capsys, no_interpreter, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no kernel image is available\nfor execution")

    monkeypatch.setattr(comparison, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(shift, "shift_eager", fails)
    assert report.main(["--test"]) == 1
    assert "packed documents, inference: no kernel image is available for execution;" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ['raise OSError("libcudart.so.13: no such file")', "import no_such_module", "1 / 0"])
def test_a_torch_that_cannot_be_imported_is_a_line(fault, tmp_path):
    (tmp_path / "torch.py").write_text(fault)
    path = os.pathsep.join([str(tmp_path), str(Path(kvshift.__file__).parents[1])])
    program = [sys.executable, "-m", "kvshift", "--test"]
    done = subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert len(re.findall(r"^  \w+Error: ", done.stdout, re.MULTILINE)) == 3
    assert done.stdout.startswith("versions\n  kvshift ")
