"""What a server has started ends with it, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvshift.serving.reaper import MARK

# A server with two processes of its own, one forked (which ends at a signal, or only when it is killed), one spawned.
SERVER = """
import os, signal, subprocess, sys, time
from kvshift.serving.vllm_command import start_reaper
start_reaper()
ids = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid]
forked = os.fork()
if not forked:
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
print(*ids, forked, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [False, True], ids=["at a signal", "only when killed"])
def test_after_a_kill_nothing_is_left(stubborn: bool, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER.replace("sys.argv", "['stubborn']") if stubborn else SERVER)
    marked = {**os.environ, MARK: f"test {stubborn}"}
    waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
    bystander = subprocess.Popen(waiting, env={**os.environ, MARK: "of another server"})
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=marked)
    try:
        assert server.stdout is not None
        children = [psutil.Process(int(pid)) for pid in server.stdout.readline().split()]
        reaper = [process for process in psutil.Process(server.pid).children() if process not in children]
        assert len(children) == 2
        assert len(reaper) == 1
        assert all(process.is_running() for process in children)
        server.send_signal(signal.SIGKILL)
        server.wait(60)
        _, alive = psutil.wait_procs([*children, *reaper], timeout=60)
        assert not alive
        assert bystander.poll() is None
    finally:
        for process in (server, bystander):
            process.kill()
            process.communicate()
