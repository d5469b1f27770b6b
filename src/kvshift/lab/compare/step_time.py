"""How long a training step of each of two models takes, side by side.

Two runs, one after the other, cannot be compared by their times: other work on the machine, the clock and the heat of
the processor differ. Here both models stand in one process and take turns of a few steps on the same rows, in rounds
of four (A B B A), in which a machine that slows down or speeds up evenly does so to both. Each round gives a ratio,
and the median of these counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvshift.lab.analysis.runs import read_run
from kvshift.lab.data.packing import collate
from kvshift.lab.data.text import load_text_data
from kvshift.lab.training.optimizer import adamw, recompute_activations
from kvshift.lab.training.train_config import TrainConfig
from kvshift.lab.variants.building import load_trained

__all__ = ["measure_step_time", "take_turns"]

_TURN_SECONDS = 0.15  # long against the clock's resolution, short against changes of the machine
_FEWEST_ROUNDS = 5


def measure_step_time(vanilla: Path, shifted: Path, seconds: float) -> dict[str, Any]:
    """Compare a step (forward, backward, clipping, AdamW) of two finished runs on the same rows.

    Args:
        vanilla, shifted: run folders; their final models are trained on, in memory only.
        seconds: to measure for; 5 rounds are measured in any case.

    Returns:
        What `take_turns` returns, with "batch_rows" and "device".
    """
    config = read_run(vanilla).options()
    data = load_text_data(config.data, seed=config.seed, tokenizer_folder=vanilla / "tokenizer")
    rows = [data.validation[number % len(data.validation)] for number in range(config.batch_size)]
    batch = {name: tensor.to(config.device) for name, tensor in collate(rows).items()}
    steps = {
        "vanilla": _step_of(vanilla, batch, config),
        "shifted": _step_of(shifted, batch, config),
    }
    wait = torch.cuda.synchronize if config.device == "cuda" else lambda: None
    return {**take_turns(steps, seconds, wait=wait), "batch_rows": len(rows), "device": config.device}


def _step_of(folder: Path, batch: dict[str, Any], config: TrainConfig) -> Callable[[], None]:
    model: Any = load_trained(read_run(folder))
    model.to(config.device).train()
    if config.gradient_checkpointing:
        recompute_activations(model)
    optimizer = adamw(model, config.optimizer, torch.device(config.device))
    parameters = list(model.parameters())
    forward = torch.compile(model) if config.compile else model

    def step() -> None:
        with torch.autocast(config.device, torch.bfloat16, enabled=config.bf16 == "yes"):
            loss = forward(**batch, use_cache=False).loss
        loss.backward()
        if config.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def take_turns(
    steps: dict[str, Callable[[], None]],
    seconds: float,
    *,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Time two functions in rounds of four turns, A B B A.

    Args:
        steps: the baseline first.
        seconds: to measure for.
        wait: blocks until the device is done.
        clock: in seconds.

    Returns:
        "ratio": median over rounds of the second's time to the first's; "low" and "high": its quartiles; "rounds";
        "steps_per_turn"; "milliseconds": median of each, per step.
    """
    first, second = steps

    def turn(name: str, count: int) -> float:
        wait()
        start = clock()
        for _ in range(count):
            steps[name]()
        wait()
        return (clock() - start) / count

    for name in steps:  # the first step sets up the optimizer, or compiles
        turn(name, 1)
    count = max(1, round(_TURN_SECONDS / max(turn(first, 1), 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = clock() + seconds
    while clock() < end or len(times[first]) < _FEWEST_ROUNDS:
        before, *inner, after = (turn(name, count) for name in (first, second, second, first))
        times[first].append((before + after) / 2)
        times[second].append(sum(inner) / 2)
    ratios = [ours / base for base, ours in zip(times[first], times[second], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "ratio": middle,
        "low": low,
        "high": high,
        "rounds": len(ratios),
        "steps_per_turn": count,
        "milliseconds": {name: 1e3 * statistics.median(values) for name, values in times.items()},
    }
