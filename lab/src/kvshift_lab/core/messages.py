"""Progress messages of a command, on stderr: stdout is reserved for its results."""

from __future__ import annotations

import sys


def log(text: str, *, command: str | None = None) -> None:
    """Print a line immediately, with the name of the command in front if it is given."""
    print(text if command is None else f"kvshift {command}: {text}", file=sys.stderr, flush=True)


def no_log(text: str) -> None:
    """Print nothing: a replacement for `log` if the message is printed elsewhere."""
