"""Ends what a server has started and left behind: `python -m kvshift.serving.reaper MARK`, with a pipe as its input.

The input ends when the server does, by whatever signal. The server was started with the mark in its environment, which
every process that it starts inherits.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import psutil

__all__ = ["MARK", "end_all", "marked"]

MARK = "KVSHIFT_SERVER"
_SECONDS = 10.0  # to end in, after which processes are killed


def marked(mark: str) -> list[psutil.Process]:
    """The processes with this mark, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):  # it has ended, or is somebody else's
            continue
    return found


def end_all(processes: list[psutil.Process]) -> None:
    """Ask them to end, and kill those that have not after a while."""
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=_SECONDS)[1]:
        with suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all(marked(sys.argv[1]))
