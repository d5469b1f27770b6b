"""The kinds of jobs: training on a task, training on text, and computations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from kvshift_lab.analysis.maps import coefficient_counts
from kvshift_lab.core.atomic import read_json, write_json
from kvshift_lab.core.environment import environment
from kvshift_lab.core.errors import DivergedError, LabError
from kvshift_lab.core.options import OptionTrait, option_names, to_json
from kvshift_lab.data.config import DataConfig, find_shared
from kvshift_lab.run.finished import is_finished, read_run
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.inputs import identify_inputs, input_differences
from kvshift_lab.run.resolve import expected_options
from kvshift_lab.run.resume import check_folder, other_options, refuse_other_options
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import RunConfig, TrainConfig, config_hash, differences
from kvshift_lab.run.train_task import TaskTrainConfig, identify_task_inputs, task_options, train_task
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.recipe import Job
from kvshift_lab.study.sweep_progress import last_step
from kvshift_lab.tasks import MaskedTextConfig
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA, with_variant


@dataclass(frozen=True, kw_only=True)
class RunJob(ABC):
    """Train one model.

    Attributes:
        arm: arm of the study.
        config: options of the run.
        tuning_for: the arm whose learning rate this run helps to choose; None for a reported run.
    """

    arm: Arm
    config: RunConfig
    tuning_for: Arm | None = None

    @property
    def seed(self) -> int:
        return self.config.seed

    def with_seeds(self, seeds: Sequence[int]) -> list[Self]:
        return [replace(self, config=replace(self.config, seed=seed)) for seed in seeds]

    def at_rate(self, rate: float) -> Self:
        """Return the same run with another learning rate."""
        optimizer = replace(self.config.optimizer, learning_rate=rate)
        return replace(self, config=replace(self.config, optimizer=optimizer))

    def tuning(self, rate: float, *, steps: int | None = None) -> Self:
        """Return a run that helps to choose the learning rate, which is part of its arm.

        Args:
            rate: learning rate to try.
            steps: number of steps, for a run with a constant rate; None for as many as this run has.
        """
        job = self.at_rate(rate)
        if steps is not None:
            assert self.config.optimizer.schedule == "constant", "fewer steps would be another schedule"
            job = replace(job, config=replace(job.config, steps=steps))
        return replace(job, arm=replace(self.arm, rate=rate), tuning_for=self.arm)

    def is_finished(self, out: Path) -> bool:
        """Return True if the run is finished. Raise a LabError if `out` has other options, or other or no text."""
        return out.exists() and check_folder(
            RunFolder(out), self._expected(self._with_local_paths()), self._identify_inputs()
        )

    def other_options(self, options: Mapping[str, Any]) -> list[str]:
        """See `Job`; the text need not be on this machine, but if it is, its content is compared, too."""
        lines = other_options(options, self._expected(self.config))
        recorded = options.get("data_facts") or {}
        if not lines and "data.corpus" in recorded:
            with suppress(LabError):
                lines = input_differences(recorded, self._identify_inputs())
        return lines

    @abstractmethod
    def run(self, out: Path) -> None:
        """See `Job`."""

    def on_bundled_text(self) -> Self:
        """Return the same run on the bundled corpus if its text is in files, else the run itself."""
        return self

    def text_files(self) -> tuple[str, ...]:
        """Return the files that the run reads, by their names in the folder of KVSHIFT_SHARED_DATA."""
        return ()

    def progress(self, out: Path) -> tuple[int, int]:
        """Return the step in the last line of the metrics, and the number of steps."""
        return last_step(RunFolder(out).metrics), self.config.steps

    def record(self, out: Path) -> dict[str, Any]:
        """Return a record with the curves of loss, accuracies and probes; the results include the last coefficients."""
        run = read_run(out)
        steps, losses = run.series("eval", "step", "loss")
        curve: dict[str, list[float | None]] = {"step": steps, "loss": losses}
        for line in run.metrics:
            if line["kind"] == "eval":
                for name, accuracy in line.get("accuracy", {}).items():
                    curve.setdefault(name, []).append(accuracy)
        probes = {line["step"]: line for line in run.metrics if line["kind"] == "probes"}
        names = {name: None for line in probes.values() for name in line if name not in _LINE_FIELDS}
        curve |= {name: [probes.get(step, {}).get(name) for step in steps] for name in names}
        return {
            "config_hash": run.config["config_hash"],
            "options": {name: value for name, value in run.config.items() if name not in _NOT_RECORDED},
            "environment": run.environment,
            "curve": curve,
            "result": {**run.result, "coefficients": run.coefficients()},
        }

    def _options(self, config: Any) -> dict[str, Any]:
        """Return the options of a run as JSON."""
        return to_json(config)

    def _expected(self, config: Any) -> dict[str, Any]:
        """Return the options as JSON, as far as they can be resolved before a run."""
        return self._options(config)

    def _with_local_paths(self) -> Any:
        """Return the options with the paths of the text on this machine."""
        return self.config

    @abstractmethod
    def _identify_inputs(self) -> dict[str, str]:
        """Return what identifies the text and the start model of the run; see `kvshift_lab.run.inputs`."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob(RunJob):
    """Train one model on one task; see `kvshift_lab.run.train_task`."""

    config: TaskTrainConfig

    def on_bundled_text(self) -> Self:
        """See `RunJob`; masked text is the only task that reads text."""
        task = self.config.task
        if not isinstance(task, MaskedTextConfig) or "/" not in task.corpus:
            return self
        task = replace(task, corpus=DataConfig().corpus, validation=None)
        return replace(self, config=replace(self.config, task=task))

    def text_files(self) -> tuple[str, ...]:
        task = self.config.task
        return _files(task.corpus, task.validation) if isinstance(task, MaskedTextConfig) else ()

    def run(self, out: Path) -> None:
        train_task(replace(self.config, out=out))

    def _options(self, config: Any) -> dict[str, Any]:
        return task_options(config)

    def _identify_inputs(self) -> dict[str, str]:
        return identify_task_inputs(self.config.task)


@dataclass(frozen=True, kw_only=True)
class MeasuredJob(RunJob):
    """A mixin that measures a model after its training, writes a file in the run folder, and records the results.

    Attributes:
        result_name: name of the result and of its file.
    """

    result_name: ClassVar[str]

    @abstractmethod
    def measure(self, model: Any, out: Path) -> dict[str, Any]:
        """Measure the model that was trained in the folder `out`, on its current device; return the results as JSON."""

    def is_finished(self, out: Path) -> bool:
        return super().is_finished(out) and self._file(out).exists()

    def run(self, out: Path) -> None:
        super().run(out)
        with RunFolder(out).locked():
            if not self.is_finished(out):
                model: Any = AutoModelForCausalLM.from_pretrained(out / "model")
                device = "cuda" if self.config.device != "cpu" and torch.cuda.is_available() else "cpu"
                write_json(self._file(out), self.measure(model.to(device), out))

    def record(self, out: Path) -> dict[str, Any]:
        """Return the record of the run; its results include the measurements."""
        found = super().record(out)
        found["result"][self.result_name] = read_json(self._file(out))
        return found

    def _file(self, out: Path) -> Path:
        return out / f"{self.result_name}.json"


@dataclass(frozen=True, kw_only=True)
class TextJob(RunJob):
    """Train one language model on text; see `kvshift_lab.run.train`.

    Attributes:
        config: options of the run. A corpus and its validation text are either bundled, or files in the folder that
            the environment variable KVSHIFT_SHARED_DATA names. Records name these files alike on every machine.
    """

    config: TrainConfig

    def on_bundled_text(self) -> Self:
        """See `RunJob`."""
        if not _is_file(self.config):
            return self
        data = replace(self.config.data, corpus=DataConfig().corpus, validation=None)
        return replace(self, config=replace(self.config, data=data))

    def text_files(self) -> tuple[str, ...]:
        return _files(*_text_paths(self.config).values()) if _is_file(self.config) else ()

    def run(self, out: Path) -> None:
        train(replace(self._with_local_paths(), out=out), self.callbacks())

    def callbacks(self) -> Sequence[TrainerCallback]:
        """Return additional callbacks of the Trainer."""
        return ()

    def record(self, out: Path) -> dict[str, Any]:
        """Return the record without the losses of single sequences, which only `kvshift compare` reads."""
        found = super().record(out)
        options = self._portable(found["options"])
        facts = options.pop("data_facts")
        result = {name: value for name, value in found["result"].items() if not name.endswith("_per_row")}
        digits = config_hash(options)
        return {**found, "options": {**options, "data_facts": facts}, "config_hash": digits, "result": result}

    def _expected(self, config: Any) -> dict[str, Any]:
        return expected_options(config)

    def _portable(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recorded options of a run with names that are the same on every machine."""
        return {**options, "data": options["data"] | _text_paths(self.config)}

    def _with_local_paths(self) -> TrainConfig:
        if not _is_file(self.config):
            return self.config
        found = {name: find_shared(value) for name, value in _text_paths(self.config).items()}
        return replace(self.config, data=replace(self.config.data, **found))

    def _identify_inputs(self) -> dict[str, str]:
        config = self._with_local_paths()
        return identify_inputs(config.data, config.init_from, config.model.config)


def pairs_of_depths(config: TrainConfig, depths: Sequence[int]) -> list[TextJob]:
    """Return jobs for the model of `config` with each depth, with KV shift and without."""
    return [
        TextJob(
            arm=Arm(variant=variant, layers=layers),
            config=replace(config, model=with_variant(replace(config.model, num_hidden_layers=layers), variant)),
        )
        for layers in depths
        for variant in SHIFTED_AND_VANILLA
    ]


@dataclass(frozen=True, kw_only=True)
class StudyJob(TextJob):
    """A `TextJob` for which divergence is a result, and whose record has counts of coefficients over training."""

    def run(self, out: Path) -> None:
        """Run the job; if a number is not finite, the run is finished with the result {"diverged_at": step}."""
        try:
            super().run(out)
        except DivergedError as error:
            write_json(RunFolder(out).result, {"diverged_at": error.step})

    def record(self, out: Path) -> dict[str, Any]:
        """Return the record; its curve includes the counts of `coefficient_counts` at each evaluation, by name."""
        found = super().record(out)
        by_step: dict[int, list[dict[str, Any]]] = {}
        for line in read_run(out).metrics:
            if line["kind"] == "coefficients":
                by_step.setdefault(line["step"], []).append(line)
        counts = [coefficient_counts(by_step.get(step, [])) for step in found["curve"]["step"]]
        if not counts or any(each is None for each in counts):
            return found
        names = counts[0] or {}
        return {
            **found,
            "curve": {**found["curve"], **{name: [each[name] for each in counts if each] for name in names}},
        }


def on_bundled_text(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs, with the bundled corpus in place of text in files."""
    return [job.on_bundled_text() if isinstance(job, RunJob) else job for job in jobs]


def require_text(jobs: Sequence[Job]) -> None:
    """Raise a LabError if a job reads a file that is not in the folder that KVSHIFT_SHARED_DATA names."""
    for name in {name: None for job in jobs if isinstance(job, RunJob) for name in job.text_files()}:
        try:
            find_shared(name)
        except LabError as error:
            raise LabError(f"{error}; --bundled-text reads Tiny Shakespeare instead, and the report says so") from None


def _files(*names: str | None) -> tuple[str, ...]:
    return tuple(name for name in names if name is not None and "/" in name)


def _is_file(config: TrainConfig) -> bool:
    """Return True if the corpus is a file: bundled corpora have no slash, data sets on the hub have a `hub_config`."""
    return "/" in config.data.corpus and config.data.hub_config is None


def _text_paths(config: TrainConfig) -> dict[str, str | None]:
    return {"corpus": config.data.corpus, "validation": config.data.validation}


_LINE_FIELDS = ("kind", "step", "tokens", "heads")
_NOT_RECORDED = {"config_hash"} | option_names(TrainConfig, OptionTrait.MACHINE_SPECIFIC)


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Compute numbers without training.

    Attributes:
        arm: arm of the study.
        config: options, as a frozen dataclass, with a field `seed` if the numbers are random.
        function: returns the result as JSON, from `config`; defined at the top level of a module.
    """

    arm: Arm
    config: Any
    function: Callable[[Any], dict[str, Any]]

    @property
    def seed(self) -> int:
        return getattr(self.config, "seed", 0)

    def with_seeds(self, seeds: Sequence[int]) -> list[Self]:
        if not hasattr(self.config, "seed"):
            return [self]
        return [replace(self, config=replace(self.config, seed=seed)) for seed in seeds]

    def is_finished(self, out: Path) -> bool:
        """Return True if the result is in `out`. Raise a LabError if it was computed with other options."""
        if not is_finished(out):
            return False
        refuse_other_options(RunFolder(out), read_json(out / "config.json"), to_json(self.config))
        return True

    def other_options(self, options: Mapping[str, Any]) -> list[str]:
        return differences(options, to_json(self.config))

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
        """Return 0 or 1 of 1: the whole computation is one step."""
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
