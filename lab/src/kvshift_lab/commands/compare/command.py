"""`kvshift compare`: trains variants, such as vanilla and KV shift, with the same options, and compares them.

OUT/compare.json                    options that all models share
OUT/seed-S/vanilla, .../kvshift     run folders of `kvshift train`, each trained by a separate process
OUT/seed-S/vanilla.json, ...        the options of each run
OUT/records.jsonl                   records of all runs, in the format of `kvshift reproduce`
OUT/step_time.json, samples.json    written when all runs are finished
OUT/report.html, table.md, summary.json, curves.png, ...    made from the files above; see `analysis.report`
"""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

from kvshift_lab.analysis.comparison import legend, table
from kvshift_lab.analysis.report import run_folder, verdicts, write_report
from kvshift_lab.analysis.tables import as_text
from kvshift_lab.commands.compare.options import CompareConfig
from kvshift_lab.commands.compare.training_process import TrainingError, TrainingProcess
from kvshift_lab.core.atomic import read_json, write_json
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.core.messages import log
from kvshift_lab.core.options import to_json
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.train_config import TrainConfig, differences
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.records import record_of, write_records
from kvshift_lab.variants.by_name import with_variant


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train the models that are not trained yet, measure them, and write the report.

    Returns:
        The numbers of `OUT/summary.json`; see `kvshift_lab.analysis.comparison.summarize`.
    """
    config.check()
    try:
        return _compare(config)
    except KeyboardInterrupt:
        raise TrainingError(
            "interrupted; finished work is kept, and the same command resumes from there", 128 + signal.SIGINT
        ) from None


def _compare(config: CompareConfig) -> dict[str, Any]:
    out = config.train.out
    seeds = range(config.train.seed, config.train.seed + config.seeds)
    with RunFolder(out).locked(out / "compare.json"):
        _adopt_folder(config)
        runs = [(job, job.config.out) for job in training_processes(config)]
        for job, folder in runs:
            job.run(folder)
        write_records(out / "records.jsonl", [record_of(job, folder) for job, folder in runs])
        folders = {variant: run_folder(out, seeds[0], variant) for variant in config.variants}
        _measure_step_time(config, folders)
        _write_samples(config, folders)
        try:
            more = config.with_seeds(3) if config.seeds == 1 else None
            summary = write_report(out, seeds, config.variants, more=more)
        except OSError as error:
            raise RunFailedError(
                f"the report in {out} could not be written: {error}; the runs are kept, and the same command writes it"
            ) from error
    _show(out, summary)
    if more is not None:
        print(f"\nMore seeds are needed to measure the variation between seeds; finished runs are kept:\n{more}")
    return summary


def training_processes(config: CompareConfig) -> list[TrainingProcess]:
    """Return a job for each variant with each seed."""
    seeds = range(config.train.seed, config.train.seed + config.seeds)
    runs = [(seed, variant) for seed in seeds for variant in config.variants]
    return [
        TrainingProcess(
            arm=Arm(variant=variant),
            config=child_config(config.train, seed, variant, equal_parameters=config.equal_parameters),
            position=f"{number} of {len(runs)}",
        )
        for number, (seed, variant) in enumerate(runs, start=1)
    ]


def child_config(train: TrainConfig, seed: int, variant: str, *, equal_parameters: bool = False) -> TrainConfig:
    """Return the options of one run. Runs differ in `out`, variant, seed and, if requested, the width of their MLPs."""
    model = with_variant(train.model, variant)
    if variant == "kv-shift" and train.init_from is None:
        model = dataclasses.replace(model, shift_targets=train.model.shift_targets)  # None: taken from the size or file
    if equal_parameters:
        from kvshift_lab.variants.building import with_vanilla_parameters

        model = with_vanilla_parameters(model)
    return dataclasses.replace(train, out=run_folder(train.out, seed, variant), seed=seed, model=model)


def _adopt_folder(config: CompareConfig) -> None:
    """Write the shared options to the folder. Raise a LabError if the folder belongs to other options."""
    path = config.train.out / "compare.json"
    options = to_json(config.train)
    if config.equal_parameters:  # absent from older comparisons
        options["equal_parameters"] = True
    if RunFolder(config.train.out).config.exists():
        raise LabError(f"out: {config.train.out} holds a run of kvshift train; choose another folder")
    if path.exists():
        lines = differences(read_json(path), options)
        if lines:
            raise LabError(
                f"out: {config.train.out} holds a comparison with other options ({'; '.join(lines)}); "
                "repeat those options, or choose another folder"
            )
    else:
        write_json(path, options)


def _measure_step_time(config: CompareConfig, folders: dict[str, Path]) -> None:
    path = config.train.out / "step_time.json"
    if config.step_time_seconds == 0 or (path.exists() and [*read_json(path)["milliseconds"]] == [*folders]):
        return
    from kvshift_lab.commands.compare.step_time import measure_step_time

    log(f"\ntiming training steps of all models in turn ({config.step_time_seconds:g} s)")
    write_json(path, measure_step_time(folders, config.step_time_seconds))


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
