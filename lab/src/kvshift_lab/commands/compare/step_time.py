"""Time of a training step of several models, measured side by side.

The times of successive runs are not comparable, because other work on the machine, the clock rate and the temperature
of the CPU differ. Here all models are in one process and take turns on the same sequences, as in `benchmarks/`
(`kvshift_lab.core.timing`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvshift_lab.core.errors import RunFailedError
from kvshift_lab.core.timing import Clock, WallClock, measure, ratios
from kvshift_lab.data.packing import collate
from kvshift_lab.data.text import load_text_data
from kvshift_lab.run.finished import read_run
from kvshift_lab.run.loading import load_trained
from kvshift_lab.run.optimizer import adamw, recompute_activations
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.variants.building import freeze_shift

_LEAST_SECONDS = 0.15  # of consecutive steps: longer than the clock's resolution, shorter than changes of the machine
_FEWEST_ROUNDS = 5


def measure_step_time(folders: Mapping[str, Path], seconds: float) -> dict[str, Any]:
    """Compare a step (forward, backward, clipping, AdamW) of finished runs on the same sequences.

    Args:
        folders: folders of runs by name, the baseline first; their final models are trained further, only in memory.
        seconds: measuring time; at least 5 rounds are measured.

    Returns:
        The result of `side_by_side`, with "batch_rows" and "device".
    """
    baseline = next(iter(folders.values()))
    config = read_run(baseline).options()
    data = load_text_data(config.data, seed=config.seed, tokenizer_folder=baseline / "tokenizer")
    rows = [data.validation[number % len(data.validation)] for number in range(config.batch_size)]
    batch = {name: tensor.to(config.device) for name, tensor in collate(rows).items()}
    steps = {name: _step_of(folder, batch, config) for name, folder in folders.items()}
    clock = WallClock(torch.cuda.synchronize) if config.device == "cuda" else WallClock()
    return {**side_by_side(steps, clock, seconds), "batch_rows": len(rows), "device": config.device}


def _step_of(folder: Path, batch: dict[str, Any], config: TrainConfig) -> Callable[[int], None]:
    run = read_run(folder)
    model: Any = load_trained(run)
    model.to(config.device).train()
    freeze_shift(model, run.options().model)
    if config.gradient_checkpointing:
        recompute_activations(model)
    optimizer = adamw(model, config.optimizer, torch.device(config.device))
    parameters = list(model.parameters())
    forward = torch.compile(model) if config.compile else model

    def step(_: int) -> None:
        with torch.autocast(config.device, torch.bfloat16, enabled=config.bf16 == "yes"):
            loss = forward(**batch, use_cache=False).loss
        loss.backward()
        if config.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def side_by_side(steps: Mapping[str, Callable[[int], object]], clock: Clock, seconds: float) -> dict[str, Any]:
    """Time functions in rounds of A B B A, or A B C C B A.

    Args:
        steps: functions by name, the baseline first.
        clock: clock for all of them.
        seconds: measuring time.

    Returns:
        "ratios" of all but the baseline, by name: "ratio", the median over rounds of its time to the baseline's, and
        the quartiles "low" and "high"; "rounds", their number; "steps_per_turn", consecutive calls of the baseline;
        "milliseconds", the median time of each for one step.
    """
    found = measure(steps, clock, _FEWEST_ROUNDS, seconds=seconds, least_seconds=_LEAST_SECONDS, mirrored=True)
    for name, times in found.items():
        if times.failure is not None:
            raise RunFailedError(f"a step of {name} could not be timed: {times.failure}")
    base, *_ = found.values()
    to_base = {name: ratios(times, base) for name, times in found.items() if times is not base}
    return {
        "ratios": {name: {"ratio": q.median, "low": q.low, "high": q.high} for name, q in to_base.items()},
        "rounds": len(base.seconds),
        "steps_per_turn": base.calls,
        "milliseconds": {name: 1e3 * statistics.median(times.seconds) for name, times in found.items()},
    }
