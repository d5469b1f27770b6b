"""What a command says while it works: on stderr, for stdout holds what it was asked for."""

from __future__ import annotations

import sys


def say(text: str, *, command: str | None = None) -> None:
    """Print a line at once, with the name of the command before it where one is given."""
    print(text if command is None else f"kvshift {command}: {text}", file=sys.stderr, flush=True)


def say_nothing(text: str) -> None:
    """In place of `say` where another says it, or has said it."""
