"""`kvshift compare`: trains variants, such as vanilla and KV shift, with the same options, and compares them.

OUT/compare.json                    options that all models share
OUT/seed-S/vanilla, .../kvshift     run folders of `kvshift train`, each trained by a separate process
OUT/records.jsonl                   records of all runs, in the format of `kvshift reproduce`
OUT/step_time.json, samples.json    written when all runs are finished
OUT/report.html, table.md, summary.json, curves.png, ...    made from the files above; see `report`
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshift_lab.analysis.tables import as_text
from kvshift_lab.commands.compare.options import CompareConfig
from kvshift_lab.commands.compare.report import run_folder, verdicts, write_report
from kvshift_lab.commands.compare.summary import legend, summarize, table
from kvshift_lab.core.atomic import read_json, write_json
from kvshift_lab.core.errors import InterruptedRunError, LabError, RunFailedError
from kvshift_lab.core.messages import log
from kvshift_lab.core.options import to_json
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.inputs import identify_inputs
from kvshift_lab.run.resolve import expected_options
from kvshift_lab.run.resume import refuse_other_files
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import TrainConfig, differences
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.jobs import RunJob
from kvshift_lab.study.recipe import Record
from kvshift_lab.study.run_study import StudyExecution, run_jobs
from kvshift_lab.variants.by_name import label_of, with_variant
from kvshift_lab.variants.model_config import ModelConfig


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train the models that are not trained yet, measure them, and write the report.

    Returns:
        The numbers of `OUT/summary.json`; see `kvshift_lab.commands.compare.summary.summarize`.

    Raises:
        LabError: an option or the folder is invalid.
        RunFailedError: at least one run failed, or the report could not be written; finished runs are kept.
        InterruptedRunError: a signal interrupted the comparison; the same command resumes it.
    """
    config.check()
    out, first = config.train.out, config.train.seed
    if first != 0 and config.seeds == 1:
        log(f"seed is {first}: one run of each variant, with seed {first}; --seeds {first} would run {first} of each")
    try:
        records = _run(config)
        with RunFolder(out).locked():
            folders = {variant: run_folder(out, first, variant) for variant in config.variants}
            summary = summarize(records, _step_time(config, folders))
            _write_samples(config, folders)
            more = config.with_seeds(3) if config.seeds == 1 else None
            _write_report(out, records, summary, more)
    except KeyboardInterrupt:
        raise InterruptedRunError(
            "interrupted; finished work is kept, and the same command resumes", signal.SIGINT
        ) from None
    _show(out, summary)
    if more is not None:
        print(f"\nMore seeds are needed to measure the variation between seeds; finished runs are kept:\n{more}")
    return summary


@dataclass(frozen=True, kw_only=True)
class CompareJob(RunJob):
    """Train one model of a comparison; see `kvshift_lab.run.train`."""

    config: TrainConfig

    def run(self, out: Path) -> None:
        log(f"\n{self.arm}, seed {self.seed}, in {out}")
        train(dataclasses.replace(self.config, out=out))

    def _expected(self, config: Any) -> dict[str, Any]:
        return expected_options(config)

    def _identify_inputs(self) -> dict[str, str]:
        return identify_inputs(self.config.data, self.config.init_from, self.config.model.config)


def compare_jobs(config: CompareConfig) -> list[CompareJob]:
    """Return a job for each variant with each seed. They differ in variant, seed and, if requested, MLP width."""
    train, jobs = config.train, []
    for variant in config.variants:
        model = with_variant(train.model, variant)
        if variant == "kv-shift" and train.init_from is None:
            model = dataclasses.replace(model, shift_targets=train.model.shift_targets)  # None: from the size or file
            _require_shift(model)
        if config.equal_parameters:
            from kvshift_lab.variants.building import with_vanilla_parameters

            model = with_vanilla_parameters(model)
        jobs.append(CompareJob(arm=Arm(variant=variant), config=dataclasses.replace(train, model=model)))
    by_label: dict[str, str] = {}
    for job in jobs:
        given = expected_options if train.init_from is None else to_json  # the first reads `model.config`
        name, label = str(job.arm.variant), label_of(given(job.config)["model"])
        if label in by_label:
            raise LabError(f"variants: with these options {by_label[label]} and {name} are the same model, {label}")
        by_label[label] = name
    seeds = range(train.seed, train.seed + config.seeds)
    return [job for seed in seeds for arm in jobs for job in arm.with_seeds([seed])]


def _require_shift(model: ModelConfig) -> None:
    """Raise a LabError if the file of `model.config` shifts nothing, so that kv-shift would be vanilla."""
    from kvshift_lab.variants.building import llama_config  # imports transformers

    if model.config is not None and not llama_config(model, vocab_size=1, sequence_length=1).shift_targets:
        raise LabError(
            f"model.config: {model.config} shifts nothing, so that kv-shift equals vanilla: give model.shift_targets"
        )


def _run(config: CompareConfig) -> list[Record]:
    """Run the missing jobs and return the records of all. Raise a LabError if the folder belongs to other options."""
    out, path = config.train.out, config.train.out / "compare.json"
    options = to_json(config.train)
    if config.equal_parameters:  # absent from older comparisons
        options["equal_parameters"] = True
    jobs = [(job, run_folder(out, job.seed, str(job.arm.variant))) for job in compare_jobs(config)]
    if RunFolder(out).config.exists():
        raise LabError(f"out: {out} holds a run of kvshift train; choose another folder")
    if path.exists():
        lines = differences(read_json(path), options)
        if lines:
            raise LabError(
                f"out: {out} holds a comparison with other options ({'; '.join(lines)}); "
                "repeat those options, or choose another folder"
            )
    else:
        try:
            out.mkdir(parents=True, exist_ok=True)
            if not any(RunFolder(folder).config.exists() for _, folder in jobs):  # nor were runs started one by one
                refuse_other_files(out, {*out.glob("seed-*")}, "comparison")
            write_json(path, options)
        except OSError as error:
            raise LabError(f"out: {out} cannot be written to: {error}") from error
    try:
        return run_jobs(jobs, StudyExecution(runs=out, folder=out, isolated=True))
    except RunFailedError:
        if not any(RunFolder(folder).config.exists() for _, folder in jobs):
            path.unlink()  # no run has begun: other options may follow
        raise


def _step_time(config: CompareConfig, folders: dict[str, Path]) -> dict[str, Any] | None:
    """Return the times of training steps, measured now if that is requested and not done; None if there are none."""
    path = config.train.out / "step_time.json"
    measured = read_json(path) if path.exists() else None
    if measured is not None and [*measured["milliseconds"]] == [*folders]:
        return measured
    if config.step_time_seconds == 0:
        return None
    from kvshift_lab.commands.compare.step_time import measure_step_time

    log(f"\ntiming training steps of all models in turn ({config.step_time_seconds:g} s)")
    write_json(path, measure_step_time(folders, config.step_time_seconds))
    return read_json(path)


def _write_samples(config: CompareConfig, folders: dict[str, Path]) -> None:
    path = config.train.out / "samples.json"
    if config.sample_tokens == 0:
        path.unlink(missing_ok=True)
        return
    asked: dict[str, Any] = {"prompt": config.prompt, "tokens": config.sample_tokens, "temperature": config.temperature}
    what = {**asked, "variants": list(folders)}
    if path.exists() and read_json(path)["asked"] == what:
        return
    from kvshift_lab.commands.compare.samples import sample

    log("generating a sample from each model")
    write_json(path, {"asked": what, **sample(folders, seed=config.train.seed, **asked)})


def _write_report(out: Path, records: Sequence[Record], summary: dict[str, Any], more: str | None) -> None:
    try:
        write_report(out, records, summary, more=more)
    except OSError as error:
        raise RunFailedError(
            f"the report in {out} could not be written: {error}; the runs are kept, and the same command writes it"
        ) from error


def _show(out: Path, summary: dict[str, Any]) -> None:
    print(f"\n{as_text(table(summary), rule=True)}\n\n{legend(summary)}\n")
    print(f"Validation loss: {verdicts(summary)}.\n")
    if (out / "samples.json").exists():
        samples = read_json(out / "samples.json")
        for name, text in samples["texts"].items():
            print(f"--- {name} continues {samples['prompt']!r}:\n{text}\n")
    places = {
        "report": "report.html",
        "table": "table.md",
        "numbers": "summary.json",
        "curves": "curves.png",
        "curves, vector": "curves.svg",
        "runs": f"seed-{summary['seeds'][0]['seed']}",
    }
    for what, name in places.items():
        print(f"{what:<15} {(out / name).resolve()}")
