"""`kvshift bench`: the cost of the shift, compared with baselines that run in the same process.

OUT/rows.jsonl             a line for each implementation of each case, written when the case is done
OUT/table.md, plot.svg, plot.png
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvshift.ops.cpu.kernel import cpu_unsupported_reason
from kvshift_lab.allocator import retain_freed_memory
from kvshift_lab.benchmarks.bench_config import PARTS, BenchConfig, Part
from kvshift_lab.benchmarks.bench_report import SMOKE, short, write
from kvshift_lab.benchmarks.cases import Case, Session, measure_case
from kvshift_lab.benchmarks.presets import PRESETS
from kvshift_lab.benchmarks.rows import RowFile
from kvshift_lab.core.environment import environment, installed_versions
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.core.options import OptionTrait, option_names, options_hash
from kvshift_lab.core.timing import EventClock, WallClock
from kvshift_lab.run.folder import RunFolder

_MODULES: dict[Part, str] = {
    "op": "operator",
    "layer": "layer",
    "train": "language_model",
    "prefill": "language_model",
    "decode": "language_model",
    "memory": "memory",
    "sweep": "linearity",
}


def bench(config: BenchConfig) -> None:
    """Measure the missing cases, and write rows, table and plot.

    Raises:
        LabError: an option or the folder is invalid, or its rows are from another commit, machine or configuration.
        RunFailedError: at least one implementation failed or disagrees with the reference; all others are measured.
    """
    config.check()
    cuda = torch.cuda.is_available() and config.device != "cpu"
    if config.device == "cuda" and not cuda:
        raise LabError("device is cuda, but PyTorch finds no CUDA device here; give cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    kept = not cuda and not config.system_malloc and retain_freed_memory()
    stamp = _stamp(config, device, kept)
    out = config.out or Path("results/bench") / _slug(stamp["hardware"])
    with RunFolder(out).locked():
        file = RowFile(out / "rows.jsonl", stamp)
        session = _session(config, device)
        for part in PARTS:
            for case in _cases(part)(session) if part in config.parts else ():
                chosen = all(text in case.name for text in config.cases)
                if chosen and not file.has(case.part, case.name):
                    session.log(f"{case.part}: {case.name}")
                    file.append(measure_case(case, device))
        rows = file.rows
        written = [out / "rows.jsonl", *write(out, rows)]
    print(short(rows) + "\n")
    if config.preset == "smoke":
        print(f"{SMOKE}.\n")
    for path in written:
        print(path.resolve())
    failed = [row for row in rows if row.get("problem")]
    problems = [f"{row['part']}, {row['case']}, {row['contestant']}: {row['problem']}" for row in failed]
    if problems:
        listed = "\n  ".join(problems)
        raise RunFailedError(f"{len(problems)} of {len(rows)} implementations could not be measured:\n  {listed}")


def _cases(part: Part) -> Callable[[Session], Iterator[Case]]:
    """Return the function that makes a part's cases; its module is imported on demand, as some import transformers."""
    return getattr(importlib.import_module(f"kvshift_lab.benchmarks.{_MODULES[part]}"), f"{part}_cases")


def _session(config: BenchConfig, device: torch.device) -> Session:
    preset = PRESETS[config.preset]
    wall = WallClock((lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None)
    return Session(
        device=device,
        preset=preset,
        rounds=config.rounds or preset.rounds,
        model_rounds=config.rounds or preset.model_rounds,
        compiled=config.compile and preset.compile,
        layers=config.layers,
        device_clock=EventClock(device) if device.type == "cuda" else wall,
        wall_clock=wall,
        log=lambda text: print(text, file=sys.stderr, flush=True),
    )


def _stamp(config: BenchConfig, device: torch.device, kept: bool) -> dict[str, Any]:
    """Return the fields of every row: the options that affect numbers, and the environment of the measurement."""
    found = environment(device, 1)
    free = option_names(BenchConfig, OptionTrait.NO_EFFECT_ON_RESULTS)
    options = {name: value for name, value in vars(config).items() if name not in free}
    options |= {"memory_kept": kept, "backend": os.environ.get("KVSHIFT_BACKEND", "auto")}
    others = installed_versions(("triton", "flash-linear-attention", "causal-conv1d"))
    refusal = cpu_unsupported_reason(torch.empty(0), 2)
    return {
        "config_hash": options_hash(BenchConfig, options),
        "options": options,
        "started": found["started"],
        "commit": found["commit"],
        "versions": {**found["versions"], **others},
        "hardware": {**found["hardware"], "cpu_kernel": refusal or "built"},
        "platform": found["platform"],
    }


def _slug(hardware: Mapping[str, Any]) -> str:
    """Return a folder name for the hardware, such as "amd-epyc-2-threads" or "nvidia-h200"."""
    name = f"{hardware['cpu']} {hardware['threads']} threads" if hardware["device"] == "cpu" else hardware["device"]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
