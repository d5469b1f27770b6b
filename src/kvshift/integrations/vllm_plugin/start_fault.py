"""The reason why a server did not start, passed to the process that prints the last message.

The engine is a separate process, and so is each worker if there are several. vLLM logs the error of a failed process
with a traceback, and the server then exits with "See root cause above". `kvshift serve` sets an environment variable to
the path of a file, in which the process that failed first writes its reason.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

FAULT_FILE = "KVSHIFT_START_FAULT"
"""Name of the environment variable that holds the path of the file."""
MESSAGES = ("EngineCore failed to start.", "WorkerProc failed to start.")
"""Messages that vLLM logs in a process that fails to start."""


class _FaultRecorder(logging.Handler):
    """Writes the reason of the first failure to a file, unless the file exists."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.msg in MESSAGES:
            with suppress(OSError), open(self.path, "x", encoding="utf-8") as file:
                file.write(error_reason(error))


def record_start_fault() -> None:
    """Watch vLLM's log if `kvshift serve` has started this process. It may be called more than once."""
    path, log = os.environ.get(FAULT_FILE), logging.getLogger("vllm")
    if path is not None and not any(isinstance(handler, _FaultRecorder) for handler in log.handlers):
        log.addHandler(_FaultRecorder(path))


def error_reason(error: BaseException) -> str:
    """Return the reason of an error in one line."""
    text = "; ".join(validation_faults(error)) or _one_line(error)
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def validation_faults(error: BaseException) -> list[str]:
    """Return the faults in a validation error of pydantic, which validates vLLM's options; [] for any other error.

    The error's own text also contains the values of all options and a link.
    """
    if type(error).__name__ != "ValidationError":
        return []
    faults: list[dict[str, Any]] = getattr(error, "errors", list)()
    raised = (fault.get("ctx", {}).get("error") for fault in faults)
    named = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
    return [_one_line(one or other) for one, other in zip(raised, named, strict=True)]


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
