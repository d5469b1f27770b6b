"""Find and read the files of a model, without importing torch or transformers, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvshift.lab.core.errors import LabError
from kvshift.lab.data.hub import download, is_hub_name, require_on_hub
from kvshift.lab.runs.checkpoints import list_checkpoints, size_fault

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def locate(name: str, say: Callable[[str], Any]) -> tuple[str, str]:
    """Return a model's folder (see `model_folder`) and its tokenizer's; for a name on the hub, that name twice."""
    if is_hub_name(name):
        require_on_hub(name, "model")
        return name, name
    folder = model_folder(name, say)
    for candidate in (folder, folder.parent / "tokenizer"):
        if any((candidate / file).is_file() for file in _TOKENIZER_FILES):
            return str(folder), str(candidate)
    raise LabError(f"model: {folder} has no tokenizer, and {folder.parent / 'tokenizer'} has none either")


def model_folder(name: str | Path, say: Callable[[str], Any]) -> Path:
    """Return the folder of the model in `name`, a run folder or a model folder; it need not contain a tokenizer.

    For a finished run, this is the final model; for an unfinished one, the latest complete checkpoint, which `say`
    reports. Nothing is changed, because the run may still be active.

    Raises:
        LabError: the folder does not exist, or contains no complete model.
    """
    folder = Path(name)
    if not folder.exists():
        raise LabError(f"model: there is no folder {name}")
    if not folder.is_dir():
        raise LabError(f"model: {name} is a file; expected a run folder, a model folder or a name on the hub")
    return folder if _is_model(folder) else _model_of_run(folder, say)


def _model_of_run(run: Path, say: Callable[[str], Any]) -> Path:
    if _is_model(run / "model"):
        return run / "model"
    checkpoints = list_checkpoints(run)
    for checkpoint in reversed(checkpoints):
        if _is_model(checkpoint) and size_fault(checkpoint) is None:
            say(f"{run} has no final model yet: using {checkpoint.name}")
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


def find_file(model: str, name: str) -> Path | None:
    """Return the path of a file of a model, downloaded if the model is on the hub, or None if it has no such file."""
    if is_hub_name(model):
        return download(model, name)
    path = Path(model) / name
    return path if path.is_file() else None


def largest_id(tokenizer: str) -> int | None:
    """Return the largest id of a tokenizer, as found by `locate`, or None if transformers is needed to determine it.

    It is needed if there is no tokenizer.json, or if tokenizer_config.json adds tokens, whose ids transformers assigns.
    """
    path, settings = (find_file(tokenizer, name) for name in ("tokenizer.json", "tokenizer_config.json"))
    if path is None:
        return None
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # tokenizers raises plain Exceptions for invalid files
        raise LabError(f"model: {path} could not be loaded: {error}") from error
    added = settings is not None and any(token not in vocabulary for token in _named_tokens(read_object(settings)))
    return None if added else max(vocabulary.values(), default=-1)


def _named_tokens(settings: dict[str, Any]) -> Iterator[str]:
    """Yield the tokens in a tokenizer_config.json, in which each is a string or an object with a string `content`."""
    for name, value in settings.items():
        if name.endswith("_token"):
            yield from _texts([value])
        elif name in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
            yield from _texts(value.values() if isinstance(value, dict) else value or ())


def _texts(tokens: Any) -> Iterator[str]:
    for token in tokens:
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            yield text


def require_ids(tokenizer: str, largest: int, vocab_size: int) -> None:
    """Raise a LabError if the `largest` id of a tokenizer is not less than the model's `vocab_size`."""
    if largest >= vocab_size:
        raise LabError(
            f"tokenizer {tokenizer} does not fit the model: its ids go up to {largest}, the model's up to "
            f"{vocab_size - 1} (vocab_size {vocab_size})"
        )
