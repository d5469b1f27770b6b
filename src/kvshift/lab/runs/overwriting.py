"""`--overwrite`: a run in place of the one that the folder holds; nothing but that is removed, and nothing early."""

from __future__ import annotations

import re
from pathlib import Path

from kvshift.lab.core.atomic import remove_folder
from kvshift.lab.core.errors import LabError
from kvshift.lab.runs.folder import RunFolder

_CHECKPOINT = re.compile(r"checkpoint-\d+(\.corrupt(-\d+)?)?")
_HALF_WRITTEN = re.compile(r"\..*\.part|\.tokenizer-.*|\.model\.former|\.next")


def refuse_what_is_no_run(folder: RunFolder, init_from: str | None) -> None:
    """Raise a LabError for a folder that holds anything besides a run; nothing is changed."""
    if not folder.config.exists():
        return
    foreign = [path.name for path in sorted(folder.path.iterdir()) if not _is_ours(folder, path)]
    if foreign:
        raise LabError(
            f"overwrite: {folder.path} holds more than a run ({', '.join(foreign[:3])}); "
            "nothing was removed: choose another folder for out"
        )
    if init_from is not None and Path(init_from).resolve().is_relative_to(folder.path.resolve()):
        raise LabError(f"overwrite: init_from ({init_from}) lies in the folder that would be removed, {folder.path}")


def next_tokenizer(folder: RunFolder) -> Path:
    """Where the tokenizer of the new run lies while the old one stands."""
    return folder.path / ".next" / "tokenizer"


def replace_run(folder: RunFolder) -> None:
    """Remove the run, once the new one is known to begin; what says that it is one goes last."""
    first = [folder.result, *folder.path.glob("checkpoint-*")]
    last = [folder.config, folder.path / ".lock", folder.path / ".next"]
    others = [path for path in folder.path.iterdir() if path not in first and path not in last]
    for path in (*first, *others, folder.config):
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)
    next_tokenizer(folder).rename(folder.tokenizer)


def _is_ours(folder: RunFolder, path: Path) -> bool:
    named = vars(folder).values()
    return (
        path in named
        or path.name == ".lock"
        or bool(_CHECKPOINT.fullmatch(path.name) or _HALF_WRITTEN.fullmatch(path.name))
    )
