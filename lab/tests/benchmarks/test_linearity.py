"""The line fitted to times over bytes, and the points that a sweep measures."""

from __future__ import annotations

import pytest

from kvshift_lab.benchmarks.linearity import fit_line, lines


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
    assert falling.seconds(100.0) == falling.overhead


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
