"""`--overwrite`: replacing the run in a folder, without removing anything else, and only once the new run begins."""

from __future__ import annotations

import re
from pathlib import Path

from kvshift_lab.core.atomic import remove_folder
from kvshift_lab.core.errors import LabError
from kvshift_lab.runs.folder import LEFTOVERS, RunFolder

_CHECKPOINT = re.compile(r"checkpoint-\d+(\.corrupt(-\d+)?)?")


def require_only_run_files(folder: RunFolder, init_from: str | None) -> None:
    """Raise a LabError if the folder contains more than a run, or the model of `init_from`. Change nothing."""
    foreign = [path.name for path in sorted(folder.path.iterdir()) if not _is_run_file(folder, path)]
    if foreign:
        raise LabError(
            f"overwrite: {folder.path} contains files that do not belong to a run ({', '.join(foreign[:3])}); nothing "
            "was removed: choose another folder for out"
        )
    if init_from is not None and Path(init_from).resolve().is_relative_to(folder.path.resolve()):
        raise LabError(f"overwrite: init_from ({init_from}) is in the folder that would be removed, {folder.path}")


def pending_tokenizer(folder: RunFolder) -> Path:
    """Return the folder of the new run's tokenizer while the old run is still there."""
    return folder.path / ".next" / "tokenizer"


def replace_run(folder: RunFolder) -> None:
    """Remove the old run and move the new one's tokenizer to its place. config.json, which marks a run, goes last."""
    first = [folder.result, *folder.path.glob("checkpoint-*")]
    last = [folder.config, folder.path / ".lock", folder.path / ".next"]
    others = [path for path in folder.path.iterdir() if path not in first and path not in last]
    for path in (*first, *others, folder.config):
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)
    pending_tokenizer(folder).rename(folder.tokenizer)


def _is_run_file(folder: RunFolder, path: Path) -> bool:
    return (
        path in vars(folder).values()
        or path.name in (".lock", ".next")
        or bool(_CHECKPOINT.fullmatch(path.name))
        or any(path.match(pattern) for pattern in LEFTOVERS)
    )
