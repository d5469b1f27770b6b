"""Why a server did not start, for the process that says so last.

The engine, and each worker of several, is a process of its own. vLLM logs what stopped it, with a traceback, and the
server then ends with "See root cause above". `kvshift serve` names a file, by an environment variable, in which the
process that stopped first leaves its reason.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

__all__ = ["FAULT_FILE", "MESSAGES", "keep_start_fault", "reason_of"]

FAULT_FILE = "KVSHIFT_START_FAULT"
"""The environment variable."""
MESSAGES = ("EngineCore failed to start.", "WorkerProc failed to start.")
"""What vLLM logs in a process that does not start."""


class _FaultKeeper(logging.Handler):
    """Leaves the reason of the first fault in a file that is not there yet."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.msg in MESSAGES:
            with suppress(OSError), open(self.path, "x", encoding="utf-8") as file:
                file.write(reason_of(error))


def keep_start_fault() -> None:
    """Watch vLLM's log, where `kvshift serve` has started this process; may be called again."""
    path, log = os.environ.get(FAULT_FILE), logging.getLogger("vllm")
    if path is not None and not any(isinstance(handler, _FaultKeeper) for handler in log.handlers):
        log.addHandler(_FaultKeeper(path))


def reason_of(error: BaseException) -> str:
    """In one line; of pydantic's errors, what was raised within, without its link and the values of all options."""
    if hasattr(error, "errors") and type(error).__name__ == "ValidationError":
        return "; ".join(map(_reason_within, error.errors()))
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _reason_within(fault: dict[str, Any]) -> str:
    raised = fault.get("ctx", {}).get("error") or f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    return " ".join(str(raised).split())
