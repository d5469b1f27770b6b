"""The environment of a run: commit, versions and hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import kvshift


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Describe the program and the machine that it runs on; `started` is in UTC."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": _commit(),
        "versions": {
            "kvshift": kvshift.__version__,
            "python": platform.python_version(),
            **installed_versions(("torch", "transformers", "accelerate", "datasets", "tokenizers")),
        },
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processes": processes,
            "cpu": _cpu_name(),
            "instructions": torch.backends.cpu.get_cpu_capability(),  # of PyTorch's kernels: decides the last bits
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": _memory(),
        },
        "platform": platform.platform(),
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Return the commit of this package's working tree, with "+" if tracked files differ from it; None if installed."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # fails in a repository around a .venv
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
