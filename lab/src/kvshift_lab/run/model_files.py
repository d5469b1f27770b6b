"""Find and read the files of a model, without importing torch or transformers, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.messages import no_log
from kvshift_lab.data.hub import is_hub_name, require_on_hub
from kvshift_lab.run.checkpoints import is_complete, list_checkpoints

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def locate(name: str, log: Callable[[str], Any]) -> tuple[str, str]:
    """Return a model's folder (see `model_folder`) and its tokenizer's; for a name on the hub, that name twice."""
    if is_hub_name(name):
        require_on_hub(name, "model")
        return name, name
    folder = model_folder(name, log)
    for candidate in (folder, folder.parent / "tokenizer"):
        if any((candidate / file).is_file() for file in _TOKENIZER_FILES):
            return str(folder), str(candidate)
    raise LabError(f"model: {folder} has no tokenizer, and {folder.parent / 'tokenizer'} has none either")


def require_models(*names: str) -> None:
    """Raise a LabError unless each is a run folder or model folder with a complete model, or a model on the hub."""
    for name in names:
        if is_hub_name(name):
            require_on_hub(name, "model")
        else:
            model_folder(name, no_log)


def model_folder(name: str | Path, log: Callable[[str], Any]) -> Path:
    """Return the folder of the model in `name`, a run folder or a model folder; it need not contain a tokenizer.

    For a finished run, this is the final model; for an unfinished one, the latest complete checkpoint, which `log`
    reports. Nothing is changed, because the run may still be active.

    Raises:
        LabError: the folder does not exist, or contains no complete model.
    """
    folder = Path(name)
    if not folder.exists():
        raise LabError(f"model: there is no folder {name}")
    if not folder.is_dir():
        raise LabError(f"model: {name} is a file; expected a run folder, a model folder or a name on the hub")
    return folder if _is_model(folder) else _model_of_run(folder, log)


def _model_of_run(run: Path, log: Callable[[str], Any]) -> Path:
    if _is_model(run / "model"):
        return run / "model"
    checkpoints = list_checkpoints(run)
    for checkpoint in reversed(checkpoints):
        if _is_model(checkpoint) and is_complete(checkpoint):
            log(f"{run} has no final model yet: using {checkpoint.name}")
            return checkpoint
    if checkpoints:
        raise LabError(
            f"model: {run} has no final model yet, and none of its {len(checkpoints)} checkpoints is complete"
        )
    for config in (run / "config.json", run / "model" / "config.json"):
        if config.is_file():
            read_object(config)  # raises an error with the reason if the file cannot be read
    raise LabError(
        f"model: {run} is neither a model (no config.json with a model_type) nor a run with a model or a checkpoint"
    )


def _is_model(folder: Path) -> bool:
    """Return True if `folder` is a model folder of transformers; the config.json of a run has no model_type."""
    try:
        return "model_type" in read_object(folder / "config.json")
    except LabError:
        return False


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model.

    Raises:
        LabError: the file cannot be read, or does not contain a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"model: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LabError(f"model: {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise LabError(f"model: {path} must contain a JSON object, got {type(found).__name__}")
    return found


def require_ids(tokenizer: str, largest: int, vocab_size: int) -> None:
    """Raise a LabError if the `largest` id of a tokenizer is not less than the model's `vocab_size`."""
    if largest >= vocab_size:
        raise LabError(
            f"tokenizer {tokenizer} does not fit the model: its ids go up to {largest}, the model's up to "
            f"{vocab_size - 1} (vocab_size {vocab_size})"
        )
