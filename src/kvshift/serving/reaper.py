"""Ends processes that a server has left behind: `python -m kvshift.serving.reaper PID`, with a pipe as standard input.

The pipe closes when the server ends, whatever signal ended it. Until then this program lists the descendants of the
server repeatedly, because they cannot be found from the server's PID after it has ended.
"""

from __future__ import annotations

import select
import sys
from contextlib import suppress
from typing import IO

import psutil

_POLL_SECONDS = 2.0  # seconds
_GRACE_SECONDS = 10.0  # seconds between SIGTERM and SIGKILL


def watch(server: psutil.Process, pipe: IO[bytes]) -> set[psutil.Process]:
    """Wait until the pipe closes, and return the descendants of the server that were seen, except this process."""
    seen: set[psutil.Process] = set()
    while not select.select([pipe], [], [], _POLL_SECONDS)[0]:
        with suppress(psutil.Error):
            seen |= set(server.children(recursive=True))
    return seen - {psutil.Process()}


def terminate_all(processes: set[psutil.Process]) -> None:
    """Terminate the processes, and kill those that have not ended after `_GRACE_SECONDS` seconds."""
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=_GRACE_SECONDS)[1]:
        with suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    terminate_all(watch(psutil.Process(int(sys.argv[1])), sys.stdin.buffer))
