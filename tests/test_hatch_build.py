"""The files that an installation leaves in place of the CPU kernel; shell scripts stand in for the compilers."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = "src/kvshift/ops/cpu"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The build hook in a temporary folder, with a stub for hatchling, which only builds install."""
    interface = "hatchling.builders.hooks.plugin.interface"
    for dots in range(5):
        name = ".".join(interface.split(".")[: dots + 1])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[interface].BuildHookInterface = object  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("KVSHIFT_PURE", "CXX"):
        monkeypatch.delenv(name, raising=False)
    hook = module.CPUKernelHook()
    hook.root, hook.directory, hook.said = str(tmp_path), str(tmp_path / "dist"), []
    hook.app = SimpleNamespace(display_warning=hook.said.append)
    (tmp_path / FOLDER).mkdir(parents=True)
    return hook


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def build(hook: Any) -> tuple[dict[str, Any], list[str]]:
    """Run the hook; return the data it passes to hatchling and the names of the files it leaves."""
    data: dict[str, Any] = {"artifacts": [], "pure_python": True}
    hook.initialize("standard", data)
    return data, sorted(path.name for path in (Path(hook.root) / FOLDER).iterdir())


def note(hook: Any) -> list[str]:
    return (Path(hook.root) / FOLDER / "_kernel.build.txt").read_text().splitlines()


BUILDS = 'for last; do :; done; echo made > "$last"'  # the argument of -o
FAILS = "for n in $(seq 100); do echo kernel.cpp:$n: error: no such type >&2; done; exit 1"


def test_a_compiler_that_fails_leaves_its_last_lines(hook, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler(tmp_path, FAILS))
    data, left = build(hook)
    assert left == ["_kernel.build.txt"]
    assert data == {"artifacts": [f"/{FOLDER}/_kernel.build.txt"], "pure_python": True}
    errors = [f"kernel.cpp:{n}: error: no such type" for n in range(81, 101)]
    lines = [f"{tmp_path}/compiler failed; its last lines:", *errors]
    assert note(hook) == lines
    assert hook.said == ["kvshift: built without the CPU kernel: " + "\n".join(lines)]


def test_a_compiler_that_fails_at_the_second_level_leaves_no_binary(hook, monkeypatch, tmp_path):
    script = f'case "$*" in *x86-64-v4*) echo unknown level >&2; exit 1;; esac; {BUILDS}'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    _, left = build(hook)
    assert left == ["_kernel.build.txt"]
    assert note(hook)[-1] == "unknown level"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no compiler", "no compiler was found: no g++ is on PATH, and CXX is not set"),
        ("CXX is no program", "/no/compiler failed; its last lines:"),
        ("left out", "it was left out, as KVSHIFT_PURE=1 asks"),
        ("another machine", "it is for Linux on x86-64, and was to be built on Linux, aarch64"),
    ],
)
def test_why_there_is_no_kernel(hook, monkeypatch, case, said):
    if case == "no compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif case == "CXX is no program":
        monkeypatch.setenv("CXX", "/no/compiler")
    elif case == "left out":
        monkeypatch.setenv("KVSHIFT_PURE", "1")
    else:
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
        monkeypatch.setattr(platform, "system", lambda: "Linux")
    _, left = build(hook)
    assert left == ["_kernel.build.txt"]
    assert note(hook)[0] == said


def test_a_build_that_succeeds_removes_the_note_of_one_that_failed(hook, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler(tmp_path, FAILS))
    build(hook)
    monkeypatch.setenv("CXX", compiler(tmp_path, BUILDS))
    data, left = build(hook)
    assert left == ["_kernel.x86-64-v3.so", "_kernel.x86-64-v4.so"]
    assert (data["artifacts"], data["pure_python"]) == ([f"/{FOLDER}/*.so"], False)
    hook.clean([])
    assert list((tmp_path / FOLDER).iterdir()) == []
