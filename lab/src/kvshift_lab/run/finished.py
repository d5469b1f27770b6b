"""Reading finished runs from their folders."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshift_lab.core.atomic import read_json
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.json_lines import read_lines
from kvshift_lab.core.options import from_json
from kvshift_lab.variants.by_name import label_of

if TYPE_CHECKING:
    from kvshift_lab.run.train_config import TrainConfig


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: folder of the run.
        config: all options as JSON, resolved.
        environment: commit, versions, hardware, command line and start time.
        metrics: records of metrics.jsonl: losses, evaluations, coefficients.
        result: final results.
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def name(self) -> str:
        """Label of the model in tables and plots."""
        return label_of(self.config["model"])

    def options(self) -> TrainConfig:
        """Return `config` as a `TrainConfig`."""
        from kvshift_lab.run.train_config import TrainConfig  # imports tyro, which benchmarks/gpu.py does without

        names = {field.name for field in dataclasses.fields(TrainConfig)}
        return from_json(TrainConfig, {name: value for name, value in self.config.items() if name in names})

    def series(self, kind: str, *fields: str) -> tuple[list[Any], ...]:
        """Return the named fields of all records of one kind, in order, as in `series("eval", "step", "loss")`."""
        lines = [line for line in self.metrics if line["kind"] == kind]
        return tuple([line[field] for line in lines] for field in fields)

    def coefficients(self) -> list[dict[str, Any]]:
        """Return each layer's final coefficients {"alpha": (heads, W), "beta": ..., "gamma": ...}, as nested lists."""
        lines = [line for line in self.metrics if line["kind"] == "coefficients"]
        latest = {line["layer"]: line for line in lines if line["step"] == lines[-1]["step"]}
        names = ("alpha", "beta", "gamma")
        return [{name: latest[layer][name] for name in names if latest[layer].get(name)} for layer in sorted(latest)]


def is_finished(folder: Path) -> bool:
    """Return True if the folder contains a finished run, whose last file is `result.json`."""
    return (folder / "result.json").is_file()


def read_run(folder: Path) -> Run:
    """Read a finished run; raise a LabError if a file is missing or damaged."""
    if not is_finished(folder):
        raise LabError(f"{folder}: no finished run (it has no result.json)")
    return Run(
        folder,
        read_json(folder / "config.json"),
        read_json(folder / "environment.json"),
        list(read_lines(folder / "metrics.jsonl")),
        read_json(folder / "result.json"),
    )
