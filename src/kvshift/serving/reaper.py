"""Ends what a server has started and left behind: `python -m kvshift.serving.reaper PID`, with a pipe as its input.

The input ends when the server does, by whatever signal. Until then the processes below the server are looked for again
and again: afterwards they are nobody's children.
"""

from __future__ import annotations

import select
import sys
from contextlib import suppress
from typing import IO

import psutil

_INTERVAL = 2.0  # seconds
_PATIENCE = 10.0  # seconds that processes have to end in before they are killed


def watch(server: psutil.Process, pipe: IO[bytes]) -> set[psutil.Process]:
    """Wait until the pipe ends; returns the processes seen below the server, but for this one."""
    seen: set[psutil.Process] = set()
    while not select.select([pipe], [], [], _INTERVAL)[0]:
        with suppress(psutil.Error):
            seen |= set(server.children(recursive=True))
    return seen - {psutil.Process()}


def end_all(processes: set[psutil.Process]) -> None:
    """Ask them to end, and kill those that have not after a while."""
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=_PATIENCE)[1]:
        with suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    end_all(watch(psutil.Process(int(sys.argv[1])), sys.stdin.buffer))
