"""Jobs that train nothing, and records that were never measured."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from kvshift_lab.core.errors import InterruptedRunError, LabError
from kvshift_lab.study.arm import Arm, arm_from_label
from kvshift_lab.study.claims import Direction
from kvshift_lab.study.entry import Entry, Preset
from kvshift_lab.study.recipe import Job, Recipe, Record
from kvshift_lab.study.sweep_progress import last_step

HARDWARE = {"device": "cpu", "cpu": "abacus", "cores": 2, "threads": 1}


def _new_pages() -> int:
    """Return how many new pages the last of eight 64 MiB blocks takes from the system, after the others were freed."""
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@dataclass(frozen=True, kw_only=True)
class Counting:
    """A job that records its runs, its process, its threads, and whether memory is kept; `ends` says how it ends."""

    label: str
    seed: int = 0
    ends: str = "well"
    beads: int = 7

    @property
    def arm(self) -> Arm:
        return Arm(case=self.label)

    def with_seeds(self, seeds: Sequence[int]) -> Sequence[Job]:
        return [replace(self, seed=seed) for seed in seeds]

    def is_finished(self, out: Path) -> bool:
        return (out / "result.json").exists()

    def other_options(self, options: Mapping[str, Any]) -> list[str]:
        there = options["beads"]
        return [] if there == self.beads else [f"beads: recorded {there}, given {self.beads}"]

    def run(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "runs").open("a") as file:
            file.write("x")
        if self.ends == "badly":
            raise LabError("the beads are lost")
        if self.ends == "faulty":
            _ = 1 / 0
        if self.ends == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.ends == "interrupted":
            raise InterruptedRunError("told to end")
        found = {
            "process": os.getpid(),
            "threads": torch.get_num_threads(),
            "main": threading.current_thread() is threading.main_thread(),
            "new_pages": _new_pages(),
        }
        (out / "result.json").write_text(json.dumps(found))

    def progress(self, out: Path) -> tuple[int, int]:
        return last_step(out / "metrics.jsonl"), 8

    def record(self, out: Path) -> dict[str, Any]:
        return {
            "config_hash": "0123456789abcdef",
            "options": {"beads": self.beads},
            "environment": {"started": "2026-01-02T03:04:05", "commit": "c0ffee", "hardware": HARDWARE},
            "curve": {},
            "result": json.loads((out / "result.json").read_text()),
        }


class Waiting(Counting):
    """A job that waits for a signal, and then counts those that arrive within a while."""

    def run(self, out: Path) -> None:
        received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: received.append(number))
        out.mkdir(parents=True, exist_ok=True)
        (out / "begun").touch()
        while not received:
            time.sleep(0.01)
        time.sleep(0.5)
        (out / "received").write_text(str(len(received)))
        raise InterruptedRunError("told to end", received[0])


def runs(out: Path) -> int:
    """Return how often the job in this folder was run."""
    path = out / "runs"
    return len(path.read_text()) if path.exists() else 0


def ran(job: Job, out: Path) -> Record:
    """Run a job from its beginning to its end, and return its record."""
    from kvshift_lab.study.records import record_of  # imports what trains, for which every new process would wait

    assert not job.is_finished(out)
    job.run(out)
    assert job.is_finished(out)
    return record_of(job, out)


def counting_recipe(labels: str, *, name: str = "abacus", study: str | None = None) -> Recipe:
    """Return a recipe with a `Counting` job for each letter and two seeds, without claims and with an empty figure."""
    presets = {"smoke": Preset(seeds=2, cost="nothing")}
    return Recipe(
        entry=Entry(name=name, title="counting with beads", presets=presets, study=study),
        source="Figure 0",
        arms=lambda preset: [Counting(label=f"Beads, {label}") for label in labels],
        plot=lambda records: Figure(),
        claims=lambda records: [],
    )


def directions(recipe: Recipe, records: Sequence[Record]) -> dict[str, Direction]:
    """Return the direction of each claim by its statement."""
    return {claim.statement: claim.direction for claim in recipe.claims(records)}


def made_up(
    arm: Arm | str,
    seed: int = 0,
    *,
    curve: Mapping[str, Sequence[float | None]] = {},
    options: Mapping[str, Any] = {},
    **result: Any,
) -> Record:
    return Record(
        arm=arm_from_label(arm) if isinstance(arm, str) else arm,
        seed=seed,
        config_hash="0123456789abcdef",
        options=options,
        environment={"started": "2026-01-02T03:04:05", "commit": "c0ffee12345", "hardware": HARDWARE},
        curve=curve,
        result=result,
    )
