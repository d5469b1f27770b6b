"""Jobs that continue a model which another run has trained first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from filelock import FileLock

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import to_json
from kvshift_lab.run.finished import read_run
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.inputs import identify_inputs
from kvshift_lab.run.train_config import config_hash
from kvshift_lab.study.jobs import TextJob

_ATTEMPTS = 5
_NEXT_SEED = 10_000  # added to the seed of a start model for each further attempt


@dataclass(frozen=True, kw_only=True)
class ContinuedJob(TextJob):
    """Train a start model that copies, once for all arms with the same seed, then continue from its weights.

    If the prefix matching of a start model is below `least_matching` at its end, another is trained with a seed that is
    10,000 higher, and so on, at most four times; the last one counts. This happens before any arm is trained. The
    folders of start models are `start/NAME/seed-S` beside the folders of the arms.

    Records name a start model by its name and the hash of its options, which are the same on every machine, and contain
    its options and its curves. The digest of its weights is among the `data_facts` of a record, so that one can check
    whether two arms began alike.

    Attributes:
        start: the job that makes the start model, with the seed of this one; it may continue a start model itself.
        start_name: name of the start model, such as "text-2-layers".
        least_matching: lowest prefix matching of the best head of a start model.
    """

    start: TextJob
    start_name: str
    least_matching: float

    def with_seeds(self, seeds: Sequence[int]) -> list[Self]:
        """Return the same job with each of these seeds, for the start model as well."""
        return [
            replace(job, start=start)
            for job, start in zip(super().with_seeds(seeds), self.start.with_seeds(seeds), strict=True)
        ]

    def run(self, out: Path) -> None:
        """Train the start model unless it is finished, waiting if another process does, then run this job."""
        folder = self._start_folder(out, self.seed)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            for attempt in range(_ATTEMPTS):
                seed = self.seed + attempt * _NEXT_SEED
                folder = self._start_folder(out, seed)
                self.start.with_seeds([seed])[0].run(folder)
                if _matching(folder) >= self.least_matching:
                    break
        self._continuing(folder).run(out)

    def is_finished(self, out: Path) -> bool:
        """See `RunJob`; the start model must have been trained with the options of `start`, too."""
        folder = self._used_start(out)
        if folder is None:
            return False
        seed = int(folder.name.removeprefix("seed-"))
        self.start.with_seeds([seed])[0].is_finished(folder)
        matching, is_last_attempt = _matching(folder), seed == self.seed + (_ATTEMPTS - 1) * _NEXT_SEED
        if matching < self.least_matching and not is_last_attempt:
            raise LabError(
                f"out: the run in {out} began from {folder}, whose prefix matching is {matching:.2f}; now it must be "
                f"{self.least_matching:g} at least: choose another folder"
            )
        return self._continuing(folder).is_finished(out)

    def on_bundled_text(self) -> Self:
        """See `RunJob`; the start model is trained on the same text."""
        return replace(super().on_bundled_text(), start=self.start.on_bundled_text())

    def record(self, out: Path) -> dict[str, Any]:
        """Return the record; the result "start" has the options and the curves of the start model."""
        found, folder = super().record(out), self._used_start(out)
        assert folder is not None
        start = self.start.record(folder)
        kept = {name: start[name] for name in ("config_hash", "options", "curve")}
        if "start" in start["result"]:
            kept["start"] = start["result"]["start"]
        return {**found, "result": {**found["result"], "start": kept}}

    def _portable(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `TextJob`; the start model has a name, and its tokenizer is that of the run."""
        found = super()._portable(options)
        data = {**found["data"], "tokenizer": None}
        return {**found, "data": data, "init_from": self._options(self.config)["init_from"]}

    def _start_folder(self, out: Path, seed: int) -> Path:
        beside = out.parents[1]
        starts = beside if beside.name == "start" else beside / "start"
        return starts / self.start_name / f"seed-{seed}"

    def _used_start(self, out: Path) -> Path | None:
        """Return the folder of the start model with which the run in `out` began; None if it has not begun."""
        folder = RunFolder(out)
        config = folder.read(folder.config) if out.exists() else None
        return None if config is None else Path(config["init_from"]).parent

    def _continuing(self, folder: Path) -> TextJob:
        """Return the run that continues the start model in a folder."""
        config = replace(self.config, init_from=str(folder / "model"))
        return TextJob(arm=self.arm, config=config, tuning_for=self.tuning_for)

    def _options(self, config: Any) -> dict[str, Any]:
        """Return the options as JSON, with the name of the start model and the hash of its options."""
        start = self.start._options(self.start.config) | {"seed": 0, "least_matching": self.least_matching}
        return to_json(config) | {"init_from": f"{self.start_name} {config_hash(start)}"}

    def _expected(self, config: Any) -> dict[str, Any]:
        """Return the options as JSON; those of the model that are not given are the start model's."""
        return self._options(replace(config, optimizer=replace(config.optimizer, warmup_steps=config.warmup_steps)))

    def _identify_inputs(self) -> dict[str, str]:
        """Return what identifies the text; the weights of a start model differ between kinds of machines."""
        return identify_inputs(self._with_local_paths().data)


def _matching(start: Path) -> float:
    """Return the prefix matching of the best head of a finished start model at its end."""
    return read_run(start).series("probes", "prefix_matching")[0][-1]
