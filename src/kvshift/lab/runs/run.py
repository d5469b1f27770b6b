"""What training left in a run folder, read back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshift.lab.core.atomic import read_json
from kvshift.lab.core.errors import LabError
from kvshift.lab.core.json_lines import read_lines
from kvshift.lab.variants.by_name import label_of

if TYPE_CHECKING:
    from kvshift.lab.training.train_config import TrainConfig


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        config: all options as JSON, with what they left open filled in.
        environment: commit, versions, hardware, command line, when started.
        metrics: the lines of metrics.jsonl: losses, evaluations, coefficients.
        result: the final numbers.
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def name(self) -> str:
        """What tables and plots call the model."""
        return label_of(self.config["model"])

    def options(self) -> TrainConfig:
        """`config` as it was given to `kvshift train`, with nothing left open."""
        from kvshift.lab.core.options import from_json  # brings the libraries that read data
        from kvshift.lab.training.train_config import TrainConfig  # brings the libraries that read data

        names = {field.name for field in dataclasses.fields(TrainConfig)}
        return from_json(TrainConfig, {name: value for name, value in self.config.items() if name in names})

    def series(self, kind: str, *fields: str) -> tuple[list[Any], ...]:
        """The named fields of all lines of one kind, in order: `series("eval", "step", "loss")`."""
        lines = [line for line in self.metrics if line["kind"] == kind]
        return tuple([line[field] for line in lines] for field in fields)

    def coefficients(self) -> list[dict[str, Any]]:
        """The last learned coefficients: for each layer {"alpha": (heads, W), "beta": (heads, W)}, as lists."""
        lines = [line for line in self.metrics if line["kind"] == "coefficients"]
        latest = {line["layer"]: line for line in lines if line["step"] == lines[-1]["step"]}
        names = ("alpha", "beta", "gamma")
        return [{name: latest[layer][name] for name in names if latest[layer].get(name)} for layer in sorted(latest)]


def is_finished(folder: Path) -> bool:
    """Whether training ended there; `result.json` is written last of all."""
    return (folder / "result.json").is_file()


def read_run(folder: Path) -> Run:
    """Read a finished run; raises LabError where a file is missing or broken."""
    if not is_finished(folder):
        raise LabError(f"{folder}: no finished run (it has no result.json)")
    return Run(
        folder,
        read_json(folder / "config.json"),
        read_json(folder / "environment.json"),
        list(read_lines(folder / "metrics.jsonl")),
        read_json(folder / "result.json"),
    )
