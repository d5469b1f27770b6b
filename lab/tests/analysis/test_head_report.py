"""The page of an analysis: the steps at which a run on a task reached 90 % and 99 % accuracy."""

from __future__ import annotations

import json
from pathlib import Path

from kvshift_lab.analysis.head_report import steps_reached


def write(path: Path, *accuracies: dict[str, float | None]) -> Path:
    lines = [{"kind": "eval", "step": 10 * (n + 1), "accuracy": found} for n, found in enumerate(accuracies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"kind": "train", "step": 1, "seconds": 0.5}, *lines]))
    return path


def test_steps_are_those_of_straight_lines_between_evaluations(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"first": 0.5, "later": 0.1, "never asked": None},
        {"first": 0.8, "later": 0.2, "never asked": None},
        {"first": 1.0, "later": 0.95, "never asked": None},
    )
    # "first" reaches 0.9 half-way between steps 20 and 30, and 0.99 at 29.5; "later" 0.9 at 20 + 10 * 0.7 / 0.75.
    assert steps_reached(path) == [("first", "25", "30"), ("later", "29", "not reached")]


def test_a_run_on_text_has_no_accuracies(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "step": 5, "loss": 1.0}) + "\n")
    assert steps_reached(tmp_path / "metrics.jsonl") == []


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert steps_reached(tmp_path / "metrics.jsonl") == []
