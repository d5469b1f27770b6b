"""`kvshift bench`: what the shift costs, each number beside its baselines in the same process and run.

OUT/rows.jsonl             a line for each contestant of each case, written when the case is done
OUT/table.md, plot.svg, plot.png
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from kvshift.benchmarks.cases import Case, Session, measure_case
from kvshift.benchmarks.presets import PRESETS
from kvshift.benchmarks.report import draw, markdown, short
from kvshift.benchmarks.rows import RowFile, options_hash
from kvshift.benchmarks.timing import EventClock, WallClock, keep_memory
from kvshift.lab.analysis.curves import save_figure
from kvshift.lab.errors import LabError
from kvshift.lab.records import RunFailedError, RunFolder, environment, write_bytes
from kvshift.ops.cpu_op import cpu_refusal

__all__ = ["BenchConfig", "bench"]

Part = Literal["op", "layer", "train", "prefill", "decode", "memory", "sweep"]
_ALL: tuple[Part, ...] = ("op", "layer", "train", "prefill", "decode", "memory", "sweep")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is measured, how large, and where the rows go.

    The same command, given again, goes on with the cases that are missing.
    """

    parts: tuple[Part, ...] = _ALL
    """op: the operator. layer: an attention layer. train, prefill, decode: whole models. memory: bytes kept for
    backward. sweep: cost against T, B, G, D and dtype."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU."""
    preset: Literal["smoke", "laptop", "paper"] = "laptop"
    """smoke: seconds, to see that it works. laptop: minutes on two cores. paper: the paper's sizes, for a GPU."""
    rounds: int | None = None
    """How many measurements of each contestant; None: the preset's."""
    layers: int | None = None
    """Layers of the paper preset's 2.9B shape; None: as many as the memory of the device holds."""
    compile: bool = True
    """Whether torch.compile takes part (never in smoke); on a CPU it needs a C++ compiler."""
    system_malloc: bool = False
    """Leave the C library's allocator as it is. Otherwise it keeps freed memory, as PyTorch's guide for CPUs advises:
    new pages cost more than what is measured."""
    out: Path | None = None
    """Folder of rows, table and plot; None: results/bench/HARDWARE."""

    def check(self) -> None:
        """Raise a LabError that names the field, its value, and what it may be."""
        if self.preset not in PRESETS:
            raise LabError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        unknown = [part for part in self.parts if part not in _ALL]
        if unknown or not self.parts:
            raise LabError(f"parts must name some of {', '.join(_ALL)}, got {list(self.parts)!r}")
        for name in ("rounds", "layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LabError(f"{name} must be 1 or more, got {value}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise LabError(f"device must be auto, cpu or cuda, got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise LabError("device is cuda, but PyTorch finds no CUDA device here; give cpu")


def bench(config: BenchConfig) -> None:
    """Measure what is missing, and write rows, table and plot.

    Raises:
        LabError: options or folder are not fit, or the rows there are of another commit, machine or configuration.
        RunFailedError: at least one path failed, or does not agree with the reference; all others are measured.
    """
    config.check()
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    kept = not cuda and not config.system_malloc and keep_memory()
    stamp = _stamp(config, device, kept)
    out = config.out or Path("results/bench") / _slug(stamp["hardware"])
    with RunFolder(out).locked():
        file = RowFile(out / "rows.jsonl", stamp)
        session = _session(config, device)
        for part in _ALL:
            for case in _cases(part)(session) if part in config.parts else ():
                if not file.has(case.part, case.name):
                    session.say(f"{case.part}: {case.name}")
                    file.append(measure_case(case, device))
        rows = file.rows
        written = [out / "rows.jsonl", out / "table.md"]
        write_bytes(written[1], markdown(rows).encode())
        figure = draw(rows)
        if figure is not None:
            written += save_figure(figure, out / "plot")
    print(short(rows) + "\n")
    for path in written:
        print(path.resolve())
    problems = [f"{row['part']}, {row['case']}, {row['contestant']}: {row['problem']}" for row in rows if _failed(row)]
    if problems:
        listed = "\n  ".join(problems)
        raise RunFailedError(f"{len(problems)} of {len(rows)} paths are not measured:\n  {listed}")


def _failed(row: Mapping[str, Any]) -> bool:
    return bool(row.get("problem"))


def _cases(part: Part) -> Callable[[Session], Iterator[Case]]:
    if part in ("train", "prefill", "decode"):
        from kvshift.benchmarks import language_model  # brings transformers

        return getattr(language_model, f"{part}_cases")
    if part == "memory":
        from kvshift.benchmarks.memory import memory_cases

        return memory_cases
    if part == "layer":
        from kvshift.benchmarks.layer import layer_cases

        return layer_cases
    from kvshift.benchmarks.operator import operator_cases
    from kvshift.benchmarks.sweep import sweep_cases

    return operator_cases if part == "op" else sweep_cases


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
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )


def _stamp(config: BenchConfig, device: torch.device, kept: bool) -> dict[str, Any]:
    """What every row carries: the options that decide numbers, and where they were measured."""
    found = environment(device, 1)
    options = {
        "preset": config.preset,
        "rounds": config.rounds,
        "layers": config.layers,
        "compile": config.compile,
        "memory_kept": kept,
        "backend": os.environ.get("KVSHIFT_BACKEND", "auto"),
    }
    others = _versions(("triton", "flash-linear-attention", "causal-conv1d"))
    refusal = cpu_refusal(torch.empty(0), 2)
    return {
        "config_hash": options_hash(options),
        "options": options,
        "started": found["started"],
        "commit": found["commit"],
        "versions": {**found["versions"], **others},
        "hardware": {**found["hardware"], "cpu_kernel": refusal or "built"},
        "platform": found["platform"],
    }


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _slug(hardware: Mapping[str, Any]) -> str:
    """ "amd-epyc-2-threads", "nvidia-h200"."""
    name = f"{hardware['cpu']} {hardware['threads']} threads" if hardware["device"] == "cpu" else hardware["device"]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
