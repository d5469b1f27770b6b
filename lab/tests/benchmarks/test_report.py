"""Tables and plots from rows: of the committed records, and of rows written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.core.json_lines import read_lines

from .scripts import script

report = script("report")
fit_line, lines = report.fit_line, report.lines
BASELINE, CONTROL = report.BASELINE, report.CONTROL
BENCH = Path(__file__).parents[3] / "results" / "bench"


def rows_of(name: str) -> list[Any]:
    return list(read_lines(BENCH / name / "rows.jsonl"))


def test_a_model_stands_beside_the_baseline_that_its_ratio_is_to():
    """A case that compares kernels is not taken for one that compares models."""
    found = report.compared_rows(rows_of("nvidia-h200-models"))
    assert {name: [(row["part"], row.get("way", "")) for row in rows] for name, rows in found.items()} == {
        "without shift": [("prefill", ""), ("layer", "")],
        "transformers' Llama": [("train", ""), ("prefill", ""), ("decode", "")],
        "kv shift, plain operations": [("train", "kernel")],
    }


def test_a_line_is_found_again():
    sizes = [1e6, 4e6, 16e6, 64e6]
    line = fit_line(sizes, [50e-6 + n / 2e9 for n in sizes])
    assert line.overhead == pytest.approx(50e-6)
    assert line.slope == pytest.approx(1 / 2e9)
    assert line.worst == pytest.approx(0, abs=1e-9)


def test_quadratic_cost_is_seen():
    sizes = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert fit_line(sizes, [n * n for n in sizes]).worst > 0.5


def test_neither_overhead_nor_slope_is_negative():
    superlinear = fit_line([1.0, 2.0, 4.0], [1.0, 3.0, 9.0])
    assert superlinear.overhead == 0
    assert superlinear.slope > 0
    falling = fit_line([1.0, 2.0], [3.0, 2.0])
    assert falling.slope == 0
    assert 2 < falling.overhead < 3


def test_one_size_is_no_line():
    with pytest.raises(ValueError, match="two points of different size"):
        fit_line([2.0, 2.0], [1.0, 1.1])


def test_lines_are_drawn_through_the_rows_of_one_axis_and_dtype():
    def row(axis, size, milliseconds):
        values = {"axis": axis, "moved_bytes": size, "milliseconds": milliseconds}
        return {"part": "sweep", "contestant": "kv_shift", "dtype": "float32", **values}

    rows = [row("T", 1000, 2.0), row("T", 2000, 4.0), row("T", 4000, 8.0), row("B", 1000, 2.0)]
    rows.append({"part": "sweep", "contestant": "kv_shift", "dtype": "float32", "axis": "T", "problem": "failed: ..."})
    found = lines(rows)
    assert list(found) == [("kv_shift", "float32", "T")]
    line, points = found["kv_shift", "float32", "T"]
    assert line.slope == pytest.approx(2e-6)
    assert points == [(1000, 2e-3), (2000, 4e-3), (4000, 8e-3)]
