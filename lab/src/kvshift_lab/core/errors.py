"""Errors with which a command ends: a message for the user and the exit code of the process."""

import importlib.util
import re
import signal
from collections import defaultdict
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, requires
from itertools import chain
from pathlib import Path
from typing import Any

_LAB_EXTRAS = ("eval", "export", "ray")  # of kvshift-lab; all others are extras of kvshift


class LabError(Exception):
    """An error that the user can fix. The message names its subject, what was found and what was expected.

    The command line prints the message without a traceback and exits with `exit_code`:
    1 for a check that found a fault, 2 for bad input, 3 for a run that failed after it started, 4 for a run folder
    that is in use, 128 + N for signal N.
    """

    exit_code = 2


class RunFailedError(LabError):
    """A run failed after it started; the files that it had written before are kept."""

    exit_code = 3


class DivergedError(RunFailedError):
    """A value in training is not finite.

    Attributes:
        step: training step at or after which the value was detected.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class InterruptedRunError(LabError):
    """A signal ended the run; the same command resumes it where it stopped."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + number  # the exit code that a shell reports for this signal


class FolderInUseError(LabError):
    """Another process uses this folder or file."""

    exit_code = 4


class CheckFailedError(LabError):
    """A check was completed and its report was written, but it found a fault."""

    exit_code = 1


def require(holds: bool, name: str, value: Any, what: str) -> None:
    """Raise a LabError unless `holds`; it names the option, the requirement `what` and the value."""
    if not holds:
        raise LabError(f"{name} must be {what}, got {value!r}")


def require_new(out: Path) -> None:
    """Raise a LabError unless a folder is empty or does not exist, and another can take its place."""
    if out.resolve() == Path.cwd() or out.is_mount():
        raise LabError(f"out must be a new or empty folder, but {out} is the current directory or a mount point")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise LabError(f"out must be a new or empty folder, but {out} already exists")


def require_unicode(text: str, name: str) -> None:
    """Raise a LabError unless the text of an option or a line, `name`, can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python decodes a command-line byte that is not UTF-8 to U+DC80 ... U+DCFF; other surrogates come from escapes.
        what = f"the byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a surrogate pair, U+{code:X}"
        raise LabError(f"{name} is not UTF-8: character {error.start} is {what}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names if none is similar."""
    known = list(known)
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra of kvshift-lab or kvshift, wherever the package itself came from."""
    return f"pip install '{'kvshift-lab' if extra in _LAB_EXTRAS else 'kvshift'}[{extra}]'"


def require_importable(what: str, packages: Iterable[str], command: str) -> None:
    """Raise a LabError if packages that `what` needs are missing; it names them and the install command."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(f"{what} needs the packages {', '.join(missing)}: {command}")


def missing_package(error: BaseException | None) -> LabError | None:
    """Return the error for a failed import, with the pip command for the missing extra; None if no extra would help."""
    extras: dict[str, set[str]] = defaultdict(set)
    for line in chain.from_iterable(map(_requirements, ("kvshift", "kvshift-lab"))):
        found = re.match(r"""([\w-]+).*extra == ["']([\w-]+)["']""", line)
        if found:
            extras[found[2]].add(found[1].replace("-", "_"))
    while error is not None:
        package = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        fitting = [extra for extra, packages in extras.items() if package in packages]
        if fitting:
            smallest = min(fitting, key=lambda extra: len(extras[extra]))
            return LabError(f"needs the package {package!r}: {install_command(smallest)}")
        error = error.__cause__
    return None


def _requirements(package: str) -> list[str]:
    try:
        return requires(package) or []
    except PackageNotFoundError:  # a checkout that is not installed
        return []
