"""The two kinds of jobs: train on a task, or work something out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvshift.lab.analysis.runs import is_finished, read_json, read_run
from kvshift.lab.runs.beginning import enter, refuse_other_options
from kvshift.lab.runs.folder import RunFolder, environment, write_json
from kvshift.lab.training.task_training import TaskTrainConfig, task_options, train_task
from kvshift.lab.training.train_config import config_hash, to_json
from kvshift.recipes.watching import last_step

__all__ = ["Computation", "TrainingJob"]


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Train one model on one task; see `kvshift.lab.training.task_training`.

    Attributes:
        label: which variant.
        config: of the run.
        tunes: the label of the reported runs whose learning rate this run helps to choose; None: it is reported.
    """

    label: str
    config: TaskTrainConfig
    tunes: str | None = None

    @property
    def seed(self) -> int:
        return self.config.seed

    def at_rate(self, rate: float, *, tuning: bool = False) -> TrainingJob:
        """The same run at another learning rate; with `tuning` one that helps to choose it, and is named by it."""
        config = replace(self.config, optimizer=replace(self.config.optimizer, learning_rate=rate))
        if not tuning:
            return replace(self, config=config)
        return replace(self, label=f"{self.label}, rate {rate:.2g}", config=config, tunes=self.label)

    def is_finished(self, out: Path) -> bool:
        """Raises a LabError where `out` holds a run with other options."""
        return out.exists() and enter(RunFolder(out), task_options(self.config))

    def run(self, out: Path) -> None:
        train_task(replace(self.config, out=out))

    def progress(self, out: Path) -> tuple[int, int]:
        """By the last line of metrics."""
        return last_step(RunFolder(out).metrics), self.config.steps

    def record(self, out: Path) -> dict[str, Any]:
        """With the curves of loss and accuracies, and the last coefficients among the results."""
        run = read_run(out)
        steps, losses, accuracies = run.series("eval", "step", "loss", "accuracy")
        curve: dict[str, list[float | None]] = {"step": steps, "loss": losses}
        for found in accuracies:
            for name, accuracy in found.items():
                curve.setdefault(name, []).append(accuracy)
        return {
            "config_hash": run.config["config_hash"],
            "options": {name: value for name, value in run.config.items() if name not in _NO_OPTIONS},
            "environment": run.environment,
            "curve": curve,
            "result": {**run.result, "coefficients": run.coefficients()},
        }


_NO_OPTIONS = ("config_hash", "out", "progress", "report_to", "data_workers")  # the last four are of the machine


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Work out numbers that need no training.

    Attributes:
        label: which variant.
        config: a frozen dataclass, the options.
        function: from `config` to JSON, on the top level of a module.
        seed: of what is drawn, if anything is.
    """

    label: str
    config: Any
    function: Callable[[Any], dict[str, Any]]
    seed: int = 0

    def is_finished(self, out: Path) -> bool:
        """Raises a LabError where `out` holds what was worked out with other options."""
        if not is_finished(out):
            return False
        refuse_other_options(RunFolder(out), read_json(out / "config.json"), to_json(self.config))
        return True

    def run(self, out: Path) -> None:
        folder = RunFolder(out)
        with folder.locked():
            if self.is_finished(out):
                return
            options = to_json(self.config)
            write_json(folder.environment, environment(torch.device("cpu"), 1))
            write_json(folder.config, {**options, "config_hash": config_hash(options)})
            write_json(folder.result, self.function(self.config))

    def progress(self, out: Path) -> tuple[int, int]:
        """All of it is one step."""
        return int(is_finished(out)), 1

    def record(self, out: Path) -> dict[str, Any]:
        options = read_json(out / "config.json")
        return {
            "config_hash": options.pop("config_hash"),
            "options": options,
            "environment": read_json(out / "environment.json"),
            "curve": {},
            "result": read_json(out / "result.json"),
        }
