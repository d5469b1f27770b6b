"""One run of a comparison: `kvshift train` in a separate process, which isolates its peak memory and its failures."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshift_lab.core.atomic import write_json
from kvshift_lab.core.errors import FolderInUseError, LabError
from kvshift_lab.core.messages import log
from kvshift_lab.core.options import to_json
from kvshift_lab.run.finished import is_finished
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.inputs import identify_inputs, require_same_inputs
from kvshift_lab.run.resume import other_options
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.study.jobs import RunJob

# Without -P, `-m` would import from the current directory before installed packages.
_TRAIN = (sys.executable, "-P", "-m", "kvshift_lab", "train")


class TrainingError(LabError):
    """A training process failed. It has printed the reason, and this process exits with the same code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class TrainingProcess(RunJob):
    """Train one model with `kvshift train`, which reads its options from a file beside the folder of the run.

    Attributes:
        config: options of the run; `out` is its folder.
        position: position among the runs of the comparison: "1 of 2".
    """

    config: TrainConfig
    position: str

    def is_finished(self, out: Path) -> bool:
        """Return True if the run is finished; `compare` has already checked its options. Raise for other inputs."""
        if not is_finished(out):
            return False
        require_same_inputs(RunFolder(out), self._identify_inputs())
        return True

    def _identify_inputs(self) -> dict[str, str]:
        return identify_inputs(self.config.data, self.config.init_from)

    def other_options(self, options: Mapping[str, Any]) -> list[str]:
        return other_options(options, to_json(self.config))

    def run(self, out: Path) -> None:
        label = f"seed {self.seed}, {self.arm.variant} ({self.position})"
        if self.is_finished(out):
            log(f"{label}: already finished")
            return
        _wait_until_free(out, label)
        options = out.with_suffix(".json")
        options.parent.mkdir(exist_ok=True)
        write_json(options, to_json(self.config))
        arguments = ["--config", str(options)]
        log(f"\n{label}: kvshift train {shlex.join(arguments)}")
        code = _run([*_TRAIN, *arguments])
        if code == LabError.exit_code and not RunFolder(out).config.exists():
            options.unlink()  # the run has not started
            with suppress(OSError):  # the seed has another run
                options.parent.rmdir()
        if code != 0:
            number = -code if code < 0 else code - 128  # of the signal, if there was one
            how = f"signal {signal.Signals(number).name}" if number in list(signal.Signals) else f"exit code {code}"
            if number == signal.SIGKILL:
                how += " (often because the system ran out of memory)"
            raise TrainingError(
                f"{label}: training ended with {how}; finished work is kept, and the same command resumes from there",
                code if code > 0 else 128 + number,
            )


def _run(command: list[str]) -> int:
    """Run a command and return its exit code; signals that end this process are forwarded to it."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals only in the main thread
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    # On Ctrl-C the child must get only the signal forwarded here: at a second one, from the terminal, it would end
    # without writing the checkpoint that it writes at the first. Hence it has a separate process group.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, lambda number, frame: process.send_signal(number)) for number in heard}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_until_free(folder: Path, label: str) -> None:
    """Wait until no process trains in `folder`. If `kvshift compare` is killed, its child continues to train."""
    waited = False
    while folder.exists():  # locking would create the folder
        try:
            with RunFolder(folder).locked():
                return
        except FolderInUseError:
            if not waited:
                log(f"{label}: an earlier process is still training in {folder}; waiting for it to end")
            waited = True
            time.sleep(1)
