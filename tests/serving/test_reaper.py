"""When a server is killed, all processes that it started end, and no others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# A server with a child, and a grandchild that inherits no environment.
SERVER = """
import os, signal, subprocess, sys, time
from kvshift.serving.vllm_command import start_reaper
start_reaper()
if not os.fork():
    signal.signal(signal.SIGTERM, signal.{how})
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={{}})
    time.sleep(600)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIG_DFL", "SIG_IGN"], ids=["at a signal", "only when killed"])
def test_after_a_kill_nothing_is_left(how: str, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER.format(how=how))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    server = subprocess.Popen([sys.executable, str(script)])
    try:
        below: list[psutil.Process] = []
        while len(below) < 3:  # one of them is the reaper
            assert server.poll() is None
            below = psutil.Process(server.pid).children(recursive=True)
        time.sleep(10)  # enough for the reaper to start and list the processes
        assert all(process.is_running() for process in below)
        server.send_signal(signal.SIGKILL)
        server.wait(60)
        _, alive = psutil.wait_procs(below, timeout=60)
        assert not alive
        assert bystander.poll() is None
    finally:
        for process in (server, bystander):
            process.kill()
            process.wait()
