"""Starting and resuming runs: check the folder, compare options and data, and find the latest checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedConfig

from kvshift_lab.core.atomic import remove_folder, write_json
from kvshift_lab.core.environment import environment
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import REMOVED, OptionTrait, option_names
from kvshift_lab.data.text import TextData
from kvshift_lab.data.tokenizers import ORIGIN
from kvshift_lab.run.checkpoints import find_checkpoint
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.inputs import require_same_inputs
from kvshift_lab.run.processes import Processes
from kvshift_lab.run.train_config import config_hash, differences
from kvshift_lab.variants.model_config import ModelConfig, model_fields

_SAMPLED_ROWS = 256
_PARTS = {"model", "optimizer", "data"}  # options that are JSON objects; runs on tasks have no "data"


@dataclass(frozen=True)
class ResumePoint:
    """Where training starts: after which step, and from which checkpoint (None: from the initial weights)."""

    step: int
    checkpoint: str | None


def check_folder(folder: RunFolder, options: dict[str, Any], inputs: Mapping[str, str]) -> bool:
    """Check that the folder is new or contains this run, before any data are read, and return True if it is finished.

    Args:
        folder: folder of the run.
        options: options as JSON. Unresolved ones (None, "auto") are only compared in `start_or_resume`.
        inputs: what identifies the run's text and start model; see `inputs`.
    """
    require_run_folder(folder)
    folder.clean()
    old = folder.read(folder.config)
    if old is None:  # an earlier process may have stopped before the run began
        remove_folder(folder.tokenizer)
        folder.environment.unlink(missing_ok=True)
        return False
    for part in _PARTS & options.keys():
        _object(folder, old, part)
    _refuse(folder, other_options(old, options))
    require_same_inputs(folder, inputs)
    return folder.result.exists()


def other_options(old: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Return a line for each option that affects results and differs from `old`, the recorded options of a run.

    Unresolved options (None, "auto") are not compared, because the recorded options contain their resolved values.
    """
    given = {name: value for name, value in options.items() if value not in (None, "auto")}
    known = {name: old.get(name) for name in given.keys() | (REMOVED & old.keys())}
    for part in _PARTS & given.keys():
        given[part] = {name: value for name, value in options[part].items() if value is not None}
        known[part] = {name: (old.get(part) or {}).get(name) for name in given[part]}
    return differences(known, given)


def require_run_folder(folder: RunFolder) -> None:
    """Raise a LabError unless the folder is new, empty, or that of a run. Write nothing.

    Hidden files are ignored, as are a tokenizer and environment.json, which a run writes before its config.json.
    """
    config = folder.read(folder.config)
    if config is not None:
        if "config_hash" not in config:
            raise LabError(f"out: {folder.config} does not belong to a run; choose a folder that is new or empty")
        return
    ours = {folder.tokenizer: folder.tokenizer / ORIGIN, folder.environment: folder.environment}
    found = sorted(folder.path.iterdir()) if folder.path.is_dir() else []
    others = [path for path in found if not (path in ours and ours[path].exists())]
    foreign = [path.name for path in others if not path.name.startswith(".")]
    if foreign:
        raise LabError(
            f"out: {folder.path} is not empty and contains no run ({', '.join(foreign[:3])} ...); "
            "choose a folder that is new or empty"
        )
    if "started" not in (folder.read(folder.environment) or {"started": None}):
        raise LabError(f"out: {folder.environment} does not belong to a run; choose a folder that is new or empty")


def start_or_resume(
    folder: RunFolder,
    options: dict[str, Any],
    processes: Processes,
    log: Callable[[str], Any],
    facts: dict[str, Any],
) -> ResumePoint:
    """Record the options and the environment of a new run, or check those of a run to resume and find its checkpoint.

    Args:
        folder: folder of the run, checked by `check_folder`.
        options: all options as JSON, resolved.
        processes: processes of the run.
        log: reports where the run resumes.
        facts: what identifies the data besides the options: inputs, and `data_fingerprint`.
    """
    here = environment(processes.device, processes.count)
    old = folder.read(folder.config)
    if old is None:
        write_json(folder.environment, here)
        known = {"data_facts": facts} if facts else {}  # the options of most tasks determine their data
        write_json(folder.config, {**options, "config_hash": config_hash(options), **known})
        return ResumePoint(0, None)

    refuse_other_options(folder, old, options)
    _refuse_other_data(folder, _object(folder, old, "data_facts"), facts)
    checkpoint = find_checkpoint(folder.path)
    step = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    log(f"resuming from {checkpoint.name}" if checkpoint else "no complete checkpoint yet: starting from the beginning")
    first = folder.read(folder.environment) or {}
    again = {"step": step, **here}
    before = first.get("continued")
    write_json(folder.environment, {**first, "continued": [*(before if isinstance(before, list) else []), again]})
    return ResumePoint(step, None if checkpoint is None else str(checkpoint))


def _object(folder: RunFolder, config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise LabError(
            f"{folder.config}: {name} must be a JSON object, got {type(value).__name__}; fix it, or choose another "
            "folder for out"
        )
    return value


def resolved_model(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of `ModelConfig` with the model's values.

    Fields that were added later and are off are None, as in the hash.
    """
    values = {name: getattr(config, name, None) for name in model_fields()}  # None: the family has no such field
    added_later = option_names(ModelConfig, OptionTrait.ADDED_LATER)
    values |= {name: values[name] or None for name in added_later & values.keys()}
    rope = getattr(config, "rope_parameters", None) or {}
    return {**values, "rope_theta": rope.get("rope_theta"), "shift_targets": list(config.shift_targets)}


def data_fingerprint(data: TextData) -> dict[str, Any]:
    """Return numbers of sequences and digests, by which a resumed run verifies that data and tokenizer are the same."""
    facts: dict[str, Any] = {
        "tokens": len(data.tokenizer),
        "tokenizer": _digest(data.tokenizer.backend_tokenizer.to_str()),
        "validation_rows": len(data.validation),
        "validation_sample": _sample(data.validation),
    }
    if isinstance(data.train, Dataset):
        facts |= {"train_rows": len(data.train), "train_sample": _sample(data.train)}
    return facts


def refuse_other_options(folder: RunFolder, old: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise a LabError that lists the `options` that differ from `old`, the folder's config.json, if there are any."""
    _refuse(folder, differences({name: old.get(name) for name in options.keys() | (REMOVED & old.keys())}, options))


def _refuse(folder: RunFolder, lines: list[str]) -> None:
    if lines:
        listed = "\n  ".join(lines)
        raise LabError(
            f"out: {folder.path} contains a run with other options:\n  {listed}\n"
            "give the same options to resume it, or choose another folder"
        )


def _refuse_other_data(folder: RunFolder, old: dict[str, Any], new: dict[str, Any]) -> None:
    known = {name: value for name, value in new.items() if name in old}  # older versions recorded less
    if old.get("tokenizer") != known.get("tokenizer"):
        raise LabError(
            f"the tokenizer, of {new['tokens']} tokens, is not the one that the run in {folder.path} was started with, "
            f"of {old.get('tokens')} tokens. Restore that one ({folder.tokenizer}), or choose another folder for out"
        )
    lines = differences({name: old[name] for name in known}, known)
    if lines:
        raise LabError(
            f"the data are not those that the run in {folder.path} was started with ({'; '.join(lines)}); restore "
            "them, or choose another folder for out"
        )


def _sample(rows: Dataset) -> str:
    """Return a digest of at least `_SAMPLED_ROWS` equally spaced sequences, or of all if there are fewer."""
    chosen = range(0, len(rows), max(1, len(rows) // _SAMPLED_ROWS))
    return _digest(json.dumps(rows.select(chosen).with_format(None)["input_ids"][:]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
