"""Builds the CPU kernel into the wheel if there is a compiler; without one the wheel is pure Python and slower.

There is one binary per x86-64 level, so that a wheel also runs on machines other than the one that built it.
KVSHIFT_PURE=1 omits the kernel.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LEVELS = ("x86-64-v3", "x86-64-v4")
SOURCE = Path("src/kvshift/ops/cpu/kernel.cpp")
NOTE = SOURCE.with_name("_kernel.build.txt")  # records why there is no kernel, for `python -m kvshift`
NOTE_LINES = 20  # how many of the compiler's last lines to record
FILES = sorted(path for path in (Path(__file__).parent / SOURCE.parent).iterdir() if path.suffix in (".cpp", ".h"))
FLAGS = (
    f"-DKVSHIFT_SOURCES={zlib.crc32(b''.join(path.read_bytes() for path in FILES))}u",  # kernel.py compares it
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-exceptions", "-fno-rtti",
    "-ffp-contract=off",  # the same roundings for every loop length
    "-Wall", "-Wextra", "-Werror", "-Wno-psabi",  # psabi: no function of the binary's interface passes vectors
)  # fmt: skip


class CPUKernelHook(BuildHookInterface):
    """A build hook that hatchling calls for every wheel, including editable ones."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel and tag the wheel for this platform, or record why there is no kernel."""
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
        """Compile for every level; return None, or why there is no kernel, with the compiler's last lines."""
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
        """Remove the binaries and the note; called by `hatch clean`."""
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
        new = binary.with_suffix(f".{os.getpid()}")  # two environments may be built at the same time
        os.replace(shutil.copy2(linked, new), binary)  # a running process keeps the old file
        compiled.unlink()
        linked.unlink()

    def _clean(self) -> None:
        for path in (Path(self.root) / SOURCE.parent).glob("_kernel.*"):
            path.unlink()
