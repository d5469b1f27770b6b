"""The folder of a run: what lies where, who may write to it, and how each file gets there whole.

OUT/config.json        options, with what they left open filled in, and facts of the data that a continuation checks
OUT/environment.json   commit, versions, hardware, command line, start (and each continuation)
OUT/tokenizer/         the tokenizer
OUT/metrics.jsonl      one JSON object a line
OUT/checkpoint-N/      what a continuation needs (`checkpoints.py`)
OUT/tensorboard/       event files, where that tracker is on
OUT/wandb/             files of Weights & Biases, where that tracker is on
OUT/model/             the final model and its tokenizer
OUT/result.json        written last: without it the run is not finished
OUT/.lock              held while a process trains here
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import kvshift
from kvshift.lab.core.errors import LabError

__all__ = [
    "FolderInUseError",
    "Metrics",
    "RunFailedError",
    "RunFolder",
    "environment",
    "new_folder",
    "read_metrics",
    "remove_folder",
    "sync_folder",
    "write_json",
]


class RunFailedError(LabError):
    """The run failed while it ran; what it had written before is kept."""

    exit_code = 3


class FolderInUseError(LabError):
    """Another process trains in this folder."""

    exit_code = 4


class RunFolder:
    """Where the files of one run lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.environment = path / "environment.json"
        self.tokenizer = path / "tokenizer"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb"
        self.model = path / "model"
        self.result = path / "result.json"

    @contextmanager
    def locked(self, *early: Path) -> Iterator[None]:
        """Make the folder and hold its lock, which ends with the process, however that ends.

        Where the block refuses what it was given (exit code 2) before a run began, the folder is as it was before.

        Args:
            early: what the block writes into the folder before that, besides tokenizer and environment.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            there = {*self.path.iterdir()} if self.path.is_dir() else set[Path]()
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise FolderInUseError(
                f"out: {self.path} is in use by another process; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            raise LabError(f"out: {self.path} cannot be written to: {error}") from error
        try:
            yield
        except LabError as error:
            if error.exit_code == LabError.exit_code and not self.config.exists():
                self._unmake(made, there, early)
            raise
        finally:
            lock.release()

    def _unmake(self, made: list[Path], there: set[Path], early: tuple[Path, ...]) -> None:
        """Remove what was not `there`, then the folders that were made, unless more was written than begins a run."""
        lock = self.path / ".lock"
        new = {*self.path.iterdir()} - there
        if not new <= {self.tokenizer, self.environment, lock, *early}:
            return
        with suppress(OSError):
            for path in new:
                remove_folder(path) if path.is_dir() else path.unlink()
            for folder in made:
                folder.rmdir()

    def read(self, path: Path) -> dict[str, Any] | None:
        """The JSON object in one of the files, or None where there is no such file."""
        try:
            values = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise LabError(f"{path} cannot be read: {error}; fix it, or choose another folder for out") from error
        if not isinstance(values, dict):
            raise LabError(
                f"{path} must hold a JSON object, got {type(values).__name__}; fix it, or choose another folder for out"
            )
        return values

    def clean(self) -> None:
        """Remove what a process that was killed has left half written."""
        for pattern in (".tokenizer-????????", ".model.part", ".model.former", ".*.json.part", ".*.jsonl.part"):
            for path in self.path.glob(pattern):
                if path.is_file():
                    path.unlink()
                else:
                    remove_folder(path)


class Metrics:
    """metrics.jsonl, open for appending: every line reaches the file at once and whole, or not at all."""

    def __init__(self, path: Path, *, up_to_step: int, say: Callable[[str], Any]) -> None:
        """Open the file without the lines beyond `up_to_step`, which a run that was stopped may have left.

        `say` is told of each damaged line before those: it is left out, and the others stay.
        """
        self._path = path
        lines = [(line, *_record(line)) for line in _lines(path)]
        until = [number for number, (_, record, _) in enumerate(lines) if record and record["step"] <= up_to_step]
        kept = []
        for number, (line, record, problem) in enumerate(lines[: until[-1] + 1] if until else [], start=1):
            if record is None:
                say(f"{path}: line {number} is damaged, {problem}; only this line is left out")
            else:
                kept.append(line + b"\n")
        write_bytes(path, b"".join(kept))
        self.seconds = max((line["seconds"] for line in read_metrics(path, "train")), default=0.0)
        self._file = path.open("ab", buffering=0)

    def write(self, **values: Any) -> None:
        """Append one object; a number that is not finite, which JSON cannot hold, raises a ValueError."""
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) == len(line):
                return
            reason = "only a part of a line could be written"
        except OSError as error:
            reason = str(error)
        self._file.truncate(end)
        raise RunFailedError(f"{self._path} could not be written: {reason}; what was written before is kept")

    def sync(self) -> None:
        """Have all lines on the disk itself."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind, in order; the last may have been cut off by the end of the process.

    Raises:
        LabError: another line is no record.
    """
    records = list(map(_record, _lines(path)))
    for number, (record, problem) in enumerate(records[:-1], start=1):
        if record is None:
            raise LabError(f"{path}: line {number} is damaged, {problem}; remove or fix it")
    return [record for record, _ in records if record and record["kind"] == kind]


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file that is there whole or, however the process ends, not at all."""
    write_bytes(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_json`, for any content."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # of a file system that cannot be written to
            part.unlink(missing_ok=True)
        raise RunFailedError(f"{path} could not be written: {error}; what was written before is kept") from error


def remove_folder(path: Path) -> None:
    """Remove a folder and what is in it, where there is one; of a symbolic link, only the link."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which then is `out`: there whole or, however the block ends, not at all.

    Raises:
        LabError: it cannot be made.
    """
    part = out.with_name(f".{out.name}.{os.getpid()}")  # beside its place, so that a rename puts it there
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise LabError(f"out: {out} cannot be made: {error}") from error
    try:
        yield part
        sync_folder(part)
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk itself."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Which program runs, on what; `started` is in UTC, memory in bytes."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": _commit(),
        "versions": {"kvshift": kvshift.__version__, "python": platform.python_version(), **_versions()},
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processes": processes,
            "cpu": _cpu_name(),
            "instructions": torch.backends.cpu.get_cpu_capability(),  # of PyTorch's kernels, which decide the last bits
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": _memory(),
        },
        "platform": platform.platform(),
    }


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def _record(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """The record that a line of metrics holds, or None and what is wrong with the line."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        return None, "not a JSON object"
    expected: dict[str, Any] = {"kind": str, "step": int}
    if record.get("kind") == "train":
        expected["seconds"] = int | float
    wrong = [name for name, kind in expected.items() if not isinstance(record.get(name), kind)]
    return (None, f"without a valid {' and '.join(wrong)}") if wrong else (record, "")


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "accelerate", "datasets", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of this package's own working tree, with "+" where files differ from it; None if installed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not some repository that a .venv lies in
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
