"""What identifies the inputs of a command that continues earlier work: its text, tokenizer and model, by content.

    text                  formats and bytes of its files, in order; of a hub dataset, the commit
    model, tokenizer      names and bytes of its files; on the hub, the commit
    model.config          its bytes

Paths and times of files do not count. SHA-256 reads each file once per process. Options are compared in `resume`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.messages import no_log
from kvshift_lab.core.options import digest
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.files import file_digest, file_stamp, find_texts, text_digest
from kvshift_lab.data.hub import model_commit
from kvshift_lab.run.model_files import locate

_MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "*.py")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")


def identify_inputs(data: DataConfig, init_from: str | None = None, model_config: Path | None = None) -> dict[str, str]:
    """Return a digest or a commit for each input of a run, by the option that gives it.

    Args:
        data: text and tokenizer of the run.
        init_from: the model from which the run starts, with its tokenizer.
        model_config: the file of `model.config`.

    Raises:
        LabError: an input does not exist, or cannot be read.
    """
    files, validation = find_texts(data.corpus, data.validation)
    found = {"data.corpus": _dataset_commit(data.corpus, data.hub_config) if files is None else text_digest(files)}
    if validation is not None:
        found["data.validation"] = text_digest(validation)
    if init_from is not None:
        try:
            found["init_from"] = identify_model(*locate(init_from, no_log))
        except LabError as error:
            raise LabError(f"init_from: {str(error).removeprefix('model: ')}") from error
    elif data.tokenizer is not None:
        found["data.tokenizer"] = _identify_folder(data.tokenizer, _TOKENIZER_FILES)
    if model_config is not None and model_config.is_file():  # that it cannot be read is reported with the model
        found["model.config"] = file_digest(file_stamp(model_config))[:16]
    return found


def identify_model(folder: str, tokenizer: str) -> str:
    """Return what identifies a model and its tokenizer, given their folders or names on the hub."""
    model = _identify_folder(folder, _MODEL_FILES)
    return digest({"model": model, "tokenizer": _identify_folder(tokenizer, _TOKENIZER_FILES)})


def input_differences(recorded: Mapping[str, Any], inputs: Mapping[str, str]) -> list[str]:
    """Return a line for each input whose content is recorded and differs."""
    return [
        f"{name}: recorded content {recorded[name]}, found {found}"
        for name, found in inputs.items()
        if recorded.get(name, found) != found
    ]


@cache
def _dataset_commit(name: str, hub_config: str | None) -> str:
    import datasets  # takes a second, and files need none of it

    try:
        commit = datasets.load_dataset_builder(name, hub_config).hash
    except Exception as error:  # the hub, HTTP, the disk and the formats raise exceptions of many types
        raise LabError(
            f"corpus: {name!r} is not a file or folder here, and finding it on the hub failed: {error}"
        ) from error
    if commit is None:
        raise LabError(f"corpus: the hub names no commit for {name!r}, so the text cannot be identified")
    return commit


def _identify_folder(name: str, patterns: Iterable[str]) -> str:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return model_commit(name)
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    return digest({file.name: file_digest(file_stamp(file)) for file in files})
