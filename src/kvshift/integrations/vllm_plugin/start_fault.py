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
    """In one line."""
    text = "; ".join(refused_within(error)) or _one_line(error)
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def refused_within(error: BaseException) -> list[str]:
    """What is wrong by an error of pydantic, which vLLM's options are made with; [] of any other error.

    Its own text adds the values of all options and a link.
    """
    if type(error).__name__ != "ValidationError":
        return []
    faults: list[dict[str, Any]] = getattr(error, "errors", list)()
    raised = (fault.get("ctx", {}).get("error") for fault in faults)
    named = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
    return [_one_line(one or other) for one, other in zip(raised, named, strict=True)]


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
