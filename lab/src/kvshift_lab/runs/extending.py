"""Extending a run to more steps: the same command with a larger `--steps`.

Only the learning rates of schedules that decay until the last step depend on the number of steps; the order of
sequences, the warm-up and everything else do not. If the learning rates so far would have been the same, the run
resumes from its last checkpoint and ends with the weights of a run started with more steps. Otherwise, `--extend` is
required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvshift_lab.core.atomic import write_json
from kvshift_lab.core.errors import LabError
from kvshift_lab.runs.checkpoints import list_checkpoints, size_fault
from kvshift_lab.runs.folder import RunFolder
from kvshift_lab.training.train_config import TrainConfig, config_hash


def is_extension(old: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return True if the options have more steps than the recorded options `old` of the run."""
    return old.get("steps", options["steps"]) < options["steps"]


def with_recorded_warmup(config: TrainConfig, folder: RunFolder) -> TrainConfig:
    """Return the options, with the recorded warm-up if they have none: the default depends on the number of steps."""
    old = folder.read(folder.config)
    if old is None or config.optimizer.warmup_steps is not None:
        return config
    return replace(config, optimizer=replace(config.optimizer, warmup_steps=old["optimizer"].get("warmup_steps")))


def has_same_schedule(optimizer: Mapping[str, Any], steps: int, done: int) -> bool:
    """Return True if a longer run would have had the same learning rates in its first `done` steps.

    Args:
        optimizer: recorded optimizer options of the run.
        steps: recorded number of steps of the run.
        done: number of steps that are done.
    """
    if optimizer["schedule"] == "constant":
        return True
    flat = optimizer["warmup_steps"]
    if optimizer["schedule"] == "wsd":
        flat = steps - round(steps * optimizer["decay_fraction"])
    return done <= flat


def refuse_extension(folder: RunFolder, old: Mapping[str, Any], options: Mapping[str, Any], *, extend: bool) -> None:
    """Raise a LabError if the run cannot be extended, or only with `extend`. Change nothing."""
    whole = [path for path in list_checkpoints(folder.path) if size_fault(path) is None]
    if not whole and folder.result.exists():
        raise LabError(
            f"steps: the run in {folder.path} has finished its {old['steps']} steps and has no complete checkpoint "
            f"from which to extend it to {options['steps']}; choose another folder for out, and init_from {folder.path}"
        )
    done = int(whole[-1].name.rpartition("-")[2]) if whole else 0
    optimizer = old["optimizer"]
    if not extend and not has_same_schedule(optimizer, old["steps"], done):
        raise LabError(
            f"steps: the run in {folder.path} was started with {old['steps']} steps; with {options['steps']}, its "
            f"schedule ({optimizer['schedule']}) would have had other learning rates before step {done}. Give --extend "
            f"to resume from {whole[-1].name} with the learning rates of the longer schedule from there on, or choose "
            "another folder for out"
        )


def record_extension(folder: RunFolder, old: Mapping[str, Any], options: Mapping[str, Any], *, done: int) -> None:
    """Record the options of the longer run, which resumes after step `done`, and remove the shorter run's result."""
    extensions = old.get("extended", [])
    if not has_same_schedule(old["optimizer"], old["steps"], done):
        extensions = [*extensions, {"after_step": done, "begun_with_steps": old["steps"]}]
    decisive = {**options, "extended": extensions} if extensions else dict(options)
    facts = {"data_facts": old["data_facts"]} if "data_facts" in old else {}
    folder.result.unlink(missing_ok=True)  # first, because the longer run is not finished
    write_json(folder.config, {**decisive, "config_hash": config_hash(decisive), **facts})
