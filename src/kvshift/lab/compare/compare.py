"""`kvshift compare`: variants, such as vanilla and KV shift, trained alike and set side by side.

OUT/compare.json                    options that all twins share
OUT/seed-S/vanilla, .../kvshift     run folders of `kvshift train`, each trained by a process of its own
OUT/seed-S/vanilla.json, ...        the options of each
OUT/step_time.json, samples.json    measured and written once all runs are finished
OUT/report.html, table.md, summary.json, curves.png, ...    drawn from the files above; see `analysis.report`
"""

from __future__ import annotations

import dataclasses
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvshift.lab.analysis.comparison import explanation, table
from kvshift.lab.analysis.report import run_folder, verdicts, write_report
from kvshift.lab.analysis.tables import as_text
from kvshift.lab.compare.compare_config import CompareConfig
from kvshift.lab.core.atomic import read_json, write_json
from kvshift.lab.core.errors import FolderInUseError, LabError, RunFailedError
from kvshift.lab.core.messages import say
from kvshift.lab.core.options import to_json
from kvshift.lab.runs.folder import RunFolder
from kvshift.lab.runs.run import is_finished
from kvshift.lab.training.train_config import TrainConfig, differences
from kvshift.lab.variants.by_name import with_variant

# -P: `-m` alone would import what lies in the current directory before what is installed.
_TRAIN = (sys.executable, "-P", "-m", "kvshift", "train")


class TrainingError(LabError):
    """A training process failed; it has said why, and its exit code is ours."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train what is not trained yet, measure, and draw the report.

    Returns:
        The numbers of `OUT/summary.json`; see `kvshift.lab.analysis.comparison.summarize`.
    """
    config.check()
    try:
        return _compare(config)
    except KeyboardInterrupt:
        raise TrainingError(
            "interrupted; what is finished is kept, and the same command resumes from there", 128 + signal.SIGINT
        ) from None


def _compare(config: CompareConfig) -> dict[str, Any]:
    out = config.train.out
    seeds = range(config.train.seed, config.train.seed + config.seeds)
    with RunFolder(out).locked(out / "compare.json"):
        _adopt_folder(config)
        runs = [(seed, variant) for seed in seeds for variant in config.variants]
        for number, (seed, variant) in enumerate(runs, start=1):
            child = child_config(config.train, seed, variant, equal_parameters=config.equal_parameters)
            _train(child, f"seed {seed}, {variant} ({number} of {len(runs)})")
        folders = {variant: run_folder(out, seeds[0], variant) for variant in config.variants}
        with _no_bars():
            _measure_step_time(config, folders)
            _write_samples(config, folders)
        try:
            more = config.with_seeds(3) if config.seeds == 1 else None
            summary = write_report(out, seeds, config.variants, more=more)
        except OSError as error:
            raise RunFailedError(
                f"the report in {out} could not be written: {error}; the runs are kept, and the same command draws it"
            ) from error
    _show(out, summary)
    if more is not None:
        print(f"\nMore seeds measure what one leaves open; runs that are finished are kept:\n{more}")
    return summary


def child_config(train: TrainConfig, seed: int, variant: str, *, equal_parameters: bool = False) -> TrainConfig:
    """Options of one run; twins differ in `out`, in what `with_variant` says and, if asked for, in MLPs' width."""
    model = with_variant(train.model, variant)
    if variant == "kv-shift" and train.init_from is None:
        model = dataclasses.replace(model, shift_targets=train.model.shift_targets)  # None: what size or file says
    if equal_parameters:
        from kvshift.lab.variants.building import with_vanilla_parameters

        model = with_vanilla_parameters(model)
    return dataclasses.replace(train, out=run_folder(train.out, seed, variant), seed=seed, model=model)


def _adopt_folder(config: CompareConfig) -> None:
    """Write down what all twins share, or find that it is what was written down before."""
    path = config.train.out / "compare.json"
    options = to_json(config.train)
    if config.equal_parameters:  # which comparisons of before do not name
        options["equal_parameters"] = True
    if RunFolder(config.train.out).config.exists():
        raise LabError(f"out: {config.train.out} holds a run of kvshift train; choose another folder")
    if path.exists():
        lines = differences(read_json(path), options)
        if lines:
            raise LabError(
                f"out: {config.train.out} holds a comparison with other options ({'; '.join(lines)}); "
                "give these again, or choose another folder"
            )
    else:
        write_json(path, options)


def _train(config: TrainConfig, label: str) -> None:
    """Train in a process of its own: its peak memory is its own, and so is its end."""
    if is_finished(config.out):
        say(f"{label}: finished before")
        return
    _wait_until_free(config.out, label)
    options = config.out.with_suffix(".json")
    options.parent.mkdir(exist_ok=True)
    write_json(options, to_json(config))
    arguments = ["--config", str(options)]
    say(f"\n{label}: kvshift train {shlex.join(arguments)}")
    code = _run([*_TRAIN, *arguments])
    if code == LabError.exit_code and not RunFolder(config.out).config.exists():
        options.unlink()  # nothing began
        with suppress(OSError):  # of a seed that has another run
            options.parent.rmdir()
    if code != 0:
        number = -code if code < 0 else code - 128  # of the signal, if it was one
        how = f"signal {signal.Signals(number).name}" if number in list(signal.Signals) else f"exit code {code}"
        if number == signal.SIGKILL:
            how += " (which a system sends that is out of memory)"
        raise TrainingError(
            f"{label}: training ended with {how}; what is finished is kept, and the same command resumes from there",
            code if code > 0 else 128 + number,
        )


def _run(command: list[str]) -> int:
    """Exit code of a child that is handed each signal to end which this process is sent."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread alone
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    # In a process group of its own a child is sent one signal at Ctrl-C, by us, and not a second one by the terminal,
    # at which it would end without the checkpoint that it writes at the first.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores the last
    before = {number: signal.signal(number, lambda number, frame: process.send_signal(number)) for number in heard}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_until_free(folder: Path, label: str) -> None:
    """Where this process was killed outright, its child trains on: that run is waited for, then continued or taken."""
    waited = False
    while folder.exists():  # the lock would make it
        try:
            with RunFolder(folder).locked():
                return
        except FolderInUseError:
            if not waited:
                say(f"{label}: an earlier process still trains in {folder}; waiting for it")
            waited = True
            time.sleep(1)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the bars of transformers, which a small model fills before one sees them."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _measure_step_time(config: CompareConfig, folders: dict[str, Path]) -> None:
    path = config.train.out / "step_time.json"
    if config.step_time_seconds == 0 or (path.exists() and [*read_json(path)["milliseconds"]] == [*folders]):
        return
    from kvshift.lab.compare.step_time import measure_step_time

    say(f"\ntime of a step, all side by side ({config.step_time_seconds:g} s)")
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
    from kvshift.lab.compare.samples import sample

    say("a sample of each")
    write_json(path, {"asked": what, **sample(folders, seed=config.train.seed, **asked)})


def _show(out: Path, summary: dict[str, Any]) -> None:
    print(f"\n{as_text(table(summary), rule=True)}\n\n{explanation(summary)}\n")
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
