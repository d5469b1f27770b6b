"""What a command tells its user when it cannot continue: a message, and the code the process exits with."""

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


class LabError(Exception):
    """A fault that the user can fix. The message names what it is about, what was found and what was expected.

    The command line prints the message without a traceback and exits with `exit_code`:
    1 for a check that found something wrong, 2 for bad input, 3 for a run that failed while it ran, 4 for a run
    folder that is in use.
    """

    exit_code = 2


class RunFailedError(LabError):
    """The run failed while it ran; what it had written before is kept."""

    exit_code = 3


class DivergedError(RunFailedError):
    """A number of the training is not finite.

    Attributes:
        step: at or after which that was seen.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class FolderInUseError(LabError):
    """Another process trains in this folder."""

    exit_code = 4


class SomethingWrongError(LabError):
    """A check ran to its end, its report is written, and something in it is wrong."""

    exit_code = 1


def require(holds: bool, name: str, value: Any, what: str) -> None:
    """Raise a LabError that names an option, what it must be and its value, unless that holds."""
    if not holds:
        raise LabError(f"{name} must be {what}, got {value!r}")


def require_new(out: Path) -> None:
    """Raise a LabError unless a folder is not there yet, or is empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise LabError(f"out must be a folder that is not there yet, or is empty; {out} is there")


def require_unicode(text: str, name: str) -> None:
    """Raise a LabError that names an option or a line, unless its text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # How Python takes a byte of the command line that is not UTF-8; any other has been written as an escape.
        what = f"the byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a surrogate pair, U+{code:X}"
        raise LabError(f"{name} is not UTF-8: character {error.start} is {what}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """What an error says of a name that is not known: the one that was probably meant, else all there are."""
    known = list(known)
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def install_command(extra: str) -> str:
    """The pip command that adds one of the package's extras, from wherever the package itself was installed.

    pip writes down where that was (direct_url.json), unless it was an index.
    """
    try:
        text = distribution("kvshift").read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    origin = json.loads(text or "{}")
    if "url" not in origin:
        return f"pip install 'kvshift[{extra}]'"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return f"pip install 'kvshift[{extra}] @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}'"
    if not origin["url"].startswith("file:"):
        return f"pip install 'kvshift[{extra}] @ {origin['url']}'"
    editable = "-e " * origin.get("dir_info", {}).get("editable", False)
    return f"pip install {editable}'{url2pathname(urlsplit(origin['url']).path)}[{extra}]'"


def require_importable(what: str, packages: Iterable[str], command: str) -> None:
    """Raise a LabError that says how to install those of the packages that are missing, which `what` needs."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(f"{what} needs the packages {', '.join(missing)}: {command}")


def missing_package(error: BaseException | None) -> LabError | None:
    """What to tell the user of an import that failed; None unless one of the package's extras would mend it."""
    extras: dict[str, set[str]] = defaultdict(set)
    for line in requires("kvshift") or ():
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
