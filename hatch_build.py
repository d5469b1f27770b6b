"""Builds the CPU kernel into the wheel where there is a compiler; without one the wheel is pure Python, and slower.

One binary per level of x86-64, so that a wheel runs on other machines than the one that built it. KVSHIFT_PURE=1
leaves the kernel out.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LEVELS = ("x86-64-v3", "x86-64-v4")
SOURCE = Path("src/kvshift/ops/cpu/kernel.cpp")
NOTE = SOURCE.with_name("_kernel.build.txt")  # why there is no kernel, for `kvshift doctor`
NOTE_LINES = 20  # of the compiler's, the last
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-exceptions", "-fno-rtti",
    "-ffp-contract=off",  # one order of roundings, whatever the length of a loop
    "-Wall", "-Wextra", "-Werror", "-Wno-psabi",  # psabi: vectors never cross a function of the binary's interface
)  # fmt: skip


class CPUKernelHook(BuildHookInterface):
    """Called by hatchling for every wheel, editable ones included."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as one for this platform."""
        note = Path(self.root) / NOTE
        why = self._build()
        if why is not None:
            self.app.display_warning(f"kvshift: built without the CPU kernel: {why}")
            note.write_text(why + "\n", encoding="utf-8")
            build_data["artifacts"] += [f"/{NOTE}"]
            return
        note.unlink(missing_ok=True)
        build_data["artifacts"] += [f"/{SOURCE.parent}/*.so"]
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"

    def _build(self) -> str | None:
        """Compile for every level; returns why there is no kernel, with the compiler's last lines."""
        if os.environ.get("KVSHIFT_PURE") == "1":
            return "it was left out, as KVSHIFT_PURE=1 asks"
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return f"it is for Linux on x86-64, and was to be built on {platform.system()}, {platform.machine()}"
        compiler = os.environ.get("CXX") or shutil.which("g++")
        if compiler is None:
            return "no compiler was found: no g++ is on PATH, and CXX is not set"
        try:
            for level in LEVELS:
                self._compile(compiler, level)
        except (OSError, subprocess.CalledProcessError) as error:
            self._clean()
            lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
            return "\n".join([f"{compiler} failed; its last lines:", *lines[-NOTE_LINES:]])
        return None

    def clean(self, versions: list[str]) -> None:
        """Called by `hatch clean`."""
        self._clean()

    def _compile(self, compiler: str, level: str) -> None:
        """Compile and link in two steps: linked without -fopenmp, the binary uses the OpenMP that torch has loaded."""
        root, source = Path(self.root), Path(self.root) / SOURCE
        binary = source.with_name(f"_kernel.{level}.so")
        scratch = Path(self.directory)
        scratch.mkdir(parents=True, exist_ok=True)
        compiled, linked = scratch / f"{level}.o", scratch / binary.name
        steps = (
            [compiler, *FLAGS, f"-march={level}", "-c", source, "-o", compiled],
            [compiler, "-shared", "-nodefaultlibs", "-lc", compiled, "-o", linked],
        )
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True, cwd=root)
        new = binary.with_suffix(f".{os.getpid()}")  # two environments may be made at a time
        os.replace(shutil.copy2(linked, new), binary)  # a running process keeps the old one
        compiled.unlink()
        linked.unlink()

    def _clean(self) -> None:
        for path in (Path(self.root) / SOURCE.parent).glob("_kernel.*"):
            path.unlink()
