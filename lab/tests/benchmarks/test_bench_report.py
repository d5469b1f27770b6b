"""The table and the plot of recorded rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvshift_lab.analysis.colors import VERMILLION
from kvshift_lab.benchmarks import bench_report
from kvshift_lab.benchmarks.bench_report import draw, markdown, write
from kvshift_lab.benchmarks.rows import read_rows

from ..analysis.drawn import colors_by_label, hidden_by_legends

ROWS = read_rows(Path(__file__).parents[3] / "results" / "bench" / "amd-epyc-2-threads" / "rows.jsonl")


def test_the_plot_is_legible(tmp_path, monkeypatch):
    figure = draw(ROWS)
    assert figure is not None
    assert not hidden_by_legends(figure)
    assert [axes.get_title() for axes in figure.axes][:2] == ["Operator, forward", "Operator, forward and backward"]
    for axes in figure.axes:
        legend = axes.get_legend()
        sizes = [text.get_fontsize() for text in (legend.get_texts() if legend else ())]
        assert all(size >= 8 for size in [*sizes, *(text.get_fontsize() for text in axes.get_yticklabels())])
    assert figure.get_figwidth() <= 12, "shrunk to the width of a page, its letters are still letters"
    by_dtype = {
        label.split()[-1]: colors
        for label, colors in colors_by_label(figure).items()
        if label.startswith("(")  # labels of shape and dtype
    }
    assert len({*map(frozenset, by_dtype.values())}) == len(by_dtype) == 2
    assert colors_by_label(figure)["kv_shift, float32"] == {VERMILLION}
    monkeypatch.setattr(bench_report, "draw", lambda rows: figure)
    written = write(tmp_path, ROWS)
    assert [path.name for path in written] == ["table.md", "plot.png", "plot.svg"]


def test_times_and_ratios_that_seem_to_contradict_each_other_are_explained():
    [row] = [row for row in ROWS if row["part"] == "train" and row["contestant"] == "kv shift"]
    [base] = [row for row in ROWS if row["part"] == "train" and row["contestant"] == "transformers' Llama"]
    assert row["milliseconds"] < base["milliseconds"]
    assert row["ratio"] > 1
    assert "it need not be the ratio of the two times beside it" in markdown(ROWS)


@pytest.mark.slow
def test_the_profiler_prints_nothing():
    code = (
        "import torch; from kvshift_lab.benchmarks.peak import peak_bytes; "
        "print(peak_bytes(lambda: torch.ones(1000), torch.device('cpu')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "4000"
    assert run.stderr == ""
