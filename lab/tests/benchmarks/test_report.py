"""Tables and plots from rows: of the committed records, and of rows written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.analysis.colors import VERMILLION
from kvshift_lab.core.json_lines import read_lines

from ..analysis.drawn import colors_by_label
from .scripts import script

report = script("report")
fit_line, lines = report.fit_line, report.lines
BASELINE, CONTROL = report.BASELINE, report.CONTROL
BENCH = Path(__file__).parents[3] / "results" / "bench"


def rows_of(name: str) -> list[Any]:
    return list(read_lines(BENCH / name / "rows.jsonl"))


def test_the_plot_has_a_panel_for_each_part():
    figure = report.draw(rows_of("amd-epyc-2-threads"))
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "Operator, forward",
        "Operator, forward and backward",
        "KV shift beside the same without shift",
        "KV shift beside transformers' Llama",
        "Sweep over T, B, G, D",
    ]
    by_label = colors_by_label(figure)
    assert by_label["kv_shift, float32"] == {VERMILLION}
    by_dtype = {label.split()[-1]: colors for label, colors in by_label.items() if label.startswith("(")}
    assert len({*map(frozenset, by_dtype.values())}) == len(by_dtype) == 2


def test_a_model_is_drawn_beside_the_baseline_that_its_ratio_is_to():
    """No baseline is drawn, and a case that compares kernels is not taken for one that compares models."""
    found = report.compared_rows(rows_of("nvidia-h200-models"))
    assert {name: [(row["part"], row.get("way", "")) for row in rows] for name, rows in found.items()} == {
        "without shift": [("prefill", ""), ("layer", "")],
        "transformers' Llama": [("train", ""), ("prefill", ""), ("decode", "")],
        "kv shift, plain operations": [("train", "kernel")],
    }
    figure = report.draw(rows_of("nvidia-h200-models"))
    labels = {axes.get_xlabel(): axes for axes in figure.axes}
    assert {*labels} == {
        f"% more time than {name} (bars: quartiles)"
        for name in ("the same without shift", "transformers' Llama", "plain operations")
    }
    points = labels["% more time than transformers' Llama (bars: quartiles)"].lines[0].get_xdata()
    assert [*points] == pytest.approx([-5.9, -8.6, 28.7], abs=0.1)


def test_times_and_ratios_that_seem_to_contradict_each_other_are_explained():
    rows = rows_of("amd-epyc-2-threads")
    [row] = [row for row in rows if row["part"] == "train" and row["contestant"] == "kv shift"]
    [base] = [row for row in rows if row["part"] == "train" and row["contestant"] == "transformers' Llama"]
    assert row["milliseconds"] < base["milliseconds"]
    assert row["ratio"] > 1
    assert "it need not be the ratio of the two times beside it" in report.markdown(rows)


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


STAMP: dict[str, Any] = {
    "shape": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "dtype": "float32",
    },
    "versions": {"vllm": "0.32.0", "torch": "2.13.0"},
    "hardware": {"cpu": "AMD EPYC", "cores": 2},
    "commit": "0123456789",
    "started": "2026-11-23T00:00:00+00:00",
}


def speed(part: str, seconds: tuple[float, float], ratio: tuple[float, float, float], **sizes: int) -> list[dict]:
    low, middle, high = ratio
    common = {"part": part, "rounds": 20, "eager": False, **sizes, **STAMP}
    ours = {"seconds": seconds[1], "ratio": middle, "ratio_quartiles": [low, high]}
    theirs = {"seconds": seconds[0], "ratio": 1.0, "ratio_quartiles": [1.0, 1.0]}
    control = {"seconds": seconds[0], "ratio": 1.01, "ratio_quartiles": [0.99, 1.02]}
    rows = {BASELINE: theirs, "KVShiftLlama": ours, CONTROL: control}
    return [{**common, "model": model, **row} for model, row in rows.items()]


def capacity(model: str, block_size: int, share: float) -> list[dict]:
    common = {"part": "capacity", "model": model, "block_size": block_size, **STAMP}
    common |= {"bytes_per_token": 24_768.0, "state_bytes_per_token": 192.0, "by_hand": 191.6}
    return [
        {**common, "tokens": tokens, "asynchronous": asynchronous, "share": share * (2 if asynchronous else 1)}
        for tokens in (128, 2048)
        for asynchronous in (False, True)
    ]


def test_speed() -> None:
    rows = [
        *speed("prompts", (2.0, 2.1), (1.01, 1.05, 1.09), requests=16, prompt_tokens=512, new_tokens=1),
        *speed("both", (4.0, 4.0), (0.98, 1.0, 1.02), requests=16, prompt_tokens=256, new_tokens=64),
        *speed("one stream", (2.0, 2.1), (1.04, 1.05, 1.06), requests=1, prompt_tokens=4, new_tokens=64),
        *speed("first token", (0.25, 0.3), (1.1, 1.2, 1.3), requests=1, prompt_tokens=512, new_tokens=1),
    ]
    table = report.serving_tables([], rows).splitlines()
    assert table[4:8] == [
        "| prompts | 16 | 512, 1 | 4,096 tokens/s | 3,901 tokens/s | 1.050 (1.010 to 1.090) | 1.010 (0.990 to 1.020) |",
        "| both | 16 | 256, 64 | 256 tokens/s | 256 tokens/s | 1.000 (0.980 to 1.020) | 1.010 (0.990 to 1.020) |",
        "| one stream | 1 | 4, 64 | 32 tokens/s | 30 tokens/s | 1.050 (1.040 to 1.060) | 1.010 (0.990 to 1.020) |",
        "| first token | 1 | 512, 1 | 0.250 s | 0.300 s | 1.200 (1.100 to 1.300) | 1.010 (0.990 to 1.020) |",
    ]
    assert "commit 01234567, 2026-11-23" in "\n".join(table)
    assert (
        report.serving_tables([], rows[::-1]).splitlines()[7:3:-1] == table[4:8]
    )  # the order of engines does not matter
    assert "1.050 (1.010 to 1.090) |  |" in report.serving_tables([], rows[:2])  # a file without a control


def test_capacity() -> None:
    rows = [*capacity("KVShiftLlama", 16, 0.0588), *capacity("KVShiftLlama", 128, 0.0078), *capacity("Qwen3", 16, 0.03)]
    table = report.serving_tables(rows, []).splitlines()
    assert table[:5] == [
        "| model | block size | bytes per token | of them raw | by hand | 128 tokens | 2,048 tokens |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| KVShiftLlama | 16 | 24,768 | 192 | 192 | 5.88 %, 11.76 % | 5.88 %, 11.76 % |",
        "| KVShiftLlama | 128 | 24,768 | 192 | 192 | 0.78 %, 1.56 % | 0.78 %, 1.56 % |",
        "| Qwen3 | 16 | 24,768 | 192 | 192 | 3.00 %, 6.00 % | 3.00 %, 6.00 % |",
    ]
