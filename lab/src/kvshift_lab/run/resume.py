"""Starting and resuming runs: check the folder, compare options and data, and find the latest checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
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
from kvshift_lab.run.inputs import input_differences
from kvshift_lab.run.processes import Processes
from kvshift_lab.run.train_config import config_hash, differences
from kvshift_lab.variants.model_config import ModelConfig, model_fields

_PARTS = {"model", "optimizer", "data"}  # options that are JSON objects; runs on tasks have no "data"
# Options that are resolved with the data, by part; with a start model, also those that it determines.
_LATER: dict[str, Set[str]] = {"": {"tokens_per_step"}, "model": {"vocab_size"}}
_OF_START_MODEL: dict[str, Set[str]] = {"model": {*model_fields(), "rope_theta"}, "data": {"tokenizer"}}


@dataclass(frozen=True)
class ResumePoint:
    """Where training starts: after which step, and from which checkpoint (None: from the initial weights)."""

    step: int
    checkpoint: str | None


def check_folder(folder: RunFolder, options: dict[str, Any], inputs: Mapping[str, str]) -> bool:
    """Check that the folder is new or contains this run, before any data are read, and return True if it is finished.

    Args:
        folder: folder of the run.
        options: options as JSON, resolved as far as possible without data; see `other_options`.
        inputs: what identifies the run's text and start model; see `inputs`.
    """
    old = folder.read(folder.config)
    if old is None:
        _require_new(folder)
        remove_folder(folder.tokenizer)  # of an earlier process that stopped before the run began
        return False
    if "config_hash" not in old:
        raise LabError(f"out: {folder.config} does not belong to a run; choose a folder that is new or empty")
    recorded = old.get("data_facts") or {}
    _refuse(folder, other_options(old, options) + input_differences(recorded, inputs))
    if unknown := sorted(inputs.keys() - recorded.keys()):
        raise LabError(
            f"out: the run in {folder.path} was started by an older version, which did not record the content of "
            f"{unknown[0]}, so it may have changed since; choose another folder for out"
        )
    return folder.result.exists()


def other_options(old: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Return a line for each option that affects results and differs from `old`, the recorded options of a run.

    Options that the machine ("auto"), the data or the start model determine are compared in `start_or_resume`, because
    the recorded options contain their resolved values.
    """
    later = _LATER if options.get("init_from") is None else {**_LATER, **_OF_START_MODEL}
    given = _without_unresolved(options, later[""])
    known = {name: old.get(name) for name in given.keys() | (REMOVED & old.keys())}
    for part in _PARTS & given.keys():
        given[part] = _without_unresolved(options[part], later.get(part, frozenset()))
        known[part] = {name: (old.get(part) or {}).get(name) for name in given[part]}
    return differences(known, given)


def _without_unresolved(options: Mapping[str, Any], later: Set[str]) -> dict[str, Any]:
    """Return the options without those that are "auto", or named in `later` and None."""
    return {name: value for name, value in options.items() if value != "auto" and not (value is None and name in later)}


def _require_new(folder: RunFolder) -> None:
    """Raise a LabError unless the folder has only what a run writes before its config.json, and hidden files."""
    first = {folder.environment} | ({folder.tokenizer} if (folder.tokenizer / ORIGIN).exists() else set())
    refuse_other_files(folder.path, first, "run")


def refuse_other_files(out: Path, own: Set[Path], what: str) -> None:
    """Raise a LabError if a folder without a "run" or "comparison" has files that are not its `own` and not hidden."""
    foreign = sorted(path.name for path in {*out.iterdir()} - own if not path.name.startswith("."))
    if foreign:
        raise LabError(
            f"out: {out} is not empty and contains no {what} ({', '.join(foreign[:3])} ...); "
            "choose a folder that is new or empty"
        )


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
        facts: what identifies the data besides the options: inputs, and `data_sizes`.
    """
    here = environment(processes.device, processes.count)
    old = folder.read(folder.config)
    if old is None:
        write_json(folder.environment, here)
        known = {"data_facts": facts} if facts else {}  # the options of most tasks determine their data
        write_json(folder.config, {**options, "config_hash": config_hash(options), **known})
        return ResumePoint(0, None)

    refuse_other_options(folder, old, options)
    recorded = old.get("data_facts") or {}
    known = {name: value for name, value in facts.items() if name in recorded}  # older versions recorded less
    _refuse(folder, differences({name: recorded[name] for name in known}, known))
    checkpoint = find_checkpoint(folder.path)
    step = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    log(f"resuming from {checkpoint.name}" if checkpoint else "no complete checkpoint yet: starting from the beginning")
    first = folder.read(folder.environment) or {}
    again = {"step": step, **here}
    write_json(folder.environment, {**first, "continued": [*first.get("continued", []), again]})
    return ResumePoint(step, None if checkpoint is None else str(checkpoint))


def resolved_model(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of `ModelConfig` with the model's values.

    Fields that were added later and are off are None, as in the hash.
    """
    values = {name: getattr(config, name, None) for name in model_fields()}  # None: the family has no such field
    added_later = option_names(ModelConfig, OptionTrait.ADDED_LATER)
    values |= {name: values[name] or None for name in added_later & values.keys()}
    rope = getattr(config, "rope_parameters", None) or {}
    return {**values, "rope_theta": rope.get("rope_theta"), "shift_targets": list(config.shift_targets)}


def data_sizes(data: TextData) -> dict[str, Any]:
    """Return the number of tokens of the tokenizer, and of sequences, except of a streamed text."""
    train = {"train_rows": len(data.train)} if isinstance(data.train, Dataset) else {}
    return {"tokens": len(data.tokenizer), "validation_rows": len(data.validation), **train}


def refuse_other_options(folder: RunFolder, old: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise a LabError that lists the `options` that differ from `old`, the folder's config.json, if there are any."""
    _refuse(folder, differences({name: old.get(name) for name in options.keys() | (REMOVED & old.keys())}, options))


def _refuse(folder: RunFolder, lines: list[str]) -> None:
    if lines:
        listed = "\n  ".join(lines)
        raise LabError(
            f"out: {folder.path} contains a run with other options or inputs:\n  {listed}\n"
            "give the same options and inputs to resume it, or choose another folder"
        )
