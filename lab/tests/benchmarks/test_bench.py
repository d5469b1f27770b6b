"""The command `kvshift bench`: rows, table and plot from options; wrong implementations are named and not timed."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from kvshift.layers import KVShift
from kvshift_lab.benchmarks import bench as command
from kvshift_lab.benchmarks import bench_report, formulations, language_model
from kvshift_lab.benchmarks.bench import BenchConfig, bench
from kvshift_lab.benchmarks.presets import PRESETS, LayerSize, Preset, Sweep
from kvshift_lab.core.errors import LabError, RunFailedError

SMOKE = PRESETS["smoke"]
TINY = dataclasses.replace(
    SMOKE,
    rounds=2,
    shapes=((2, 13, 3, 4),),
    dtypes=(torch.float32,),
    layers=(LayerSize(batch=2, length=13, embed_dim=24, heads=6, kv_heads=3),),
    memory=(),
    sweep=Sweep(base=(1, 8, 2, 4), axes={"T": (8, 16, 32)}, dtypes=(torch.float32,)),
)


@pytest.fixture
def preset(monkeypatch):
    """A function that sets the sizes of the preset. The environment is determined once, because that calls git."""

    def choose(preset: Preset) -> None:
        monkeypatch.setattr(command, "PRESETS", {"smoke": preset})

    choose(TINY)
    found = command.environment(torch.device("cpu"), 1)
    monkeypatch.setattr(command, "environment", lambda device, processes: found)
    return choose


@pytest.fixture
def without_plot(monkeypatch):
    """Skip plots, which take longer than the rows. The first test draws those of every part."""
    monkeypatch.setattr(bench_report, "draw", lambda rows: None)


def config(out, *parts, **options):
    return BenchConfig(parts=parts, preset="smoke", device="cpu", system_malloc=True, out=out, **options)


def read(out):
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_part_leaves_rows_table_and_plot(preset, tmp_path, capsys):
    parts = ("op", "layer", "train", "prefill", "decode", "sweep")
    bench(config(tmp_path, *parts))
    rows = read(tmp_path)
    assert {row["part"] for row in rows} == set(parts)
    assert not [row for row in rows if "problem" in row]
    left_out = {row["contestant"]: row["left_out"] for row in rows if "left_out" in row}
    assert left_out["causal-conv1d"] == left_out["kv_shift, triton"] == "needs a CUDA device"
    assert "--no-compile" in left_out["kv_shift, compiled"]
    rows = [row for row in rows if "left_out" not in row]
    assert all(row["milliseconds"] > 0 and row["ratio"] > 0 for row in rows)
    for row in rows:
        assert row["commit"] == rows[0]["commit"]
        assert row["hardware"]["threads"] == torch.get_num_threads()
    baselines = {(row["part"], row["case"]): row for row in reversed(rows)}
    assert all(row["ratio"] == row["ratio_low"] == row["ratio_high"] == 1 for row in baselines.values())
    operator = [row for row in rows if row["part"] == "op" and row["contestant"] == "kv_shift"]
    measured = {(row["part"], row["contestant"]) for row in rows}
    assert {("op", "kv_shift, documents"), ("op", "kv_shift, left padding")} <= measured
    assert ("train", "kv shift, plain operations") in measured
    element = 2 * 13 * 3 * 4 * 4  # bytes of k
    assert [row["moved_bytes"] for row in operator] == [2 * 2 * element, 5 * 2 * element]
    assert [row["peak_bytes"] // (2 * element) for row in operator] == [1, 2], "results; with gradients of k and v"
    table = (tmp_path / "table.md").read_text()
    for heading in ("## Operator", "## Training", "## Cost against", "| along |"):
        assert heading in table
    assert (tmp_path / "plot.svg").exists()
    assert (tmp_path / "plot.png").exists()
    printed = capsys.readouterr().out
    assert "kv_shift" in printed
    assert "off a straight line" in printed
    for text in (printed, table):
        assert "; causal-conv1d | fla ShortConvolution |" in text
        assert "The preset smoke only shows that everything runs" in text
    assert "need not be the ratio of the two times" in table


def test_a_second_call_measures_what_is_missing_and_nothing_else(preset, without_plot, tmp_path, capsys):
    bench(config(tmp_path, "sweep"))
    before = (tmp_path / "rows.jsonl").read_bytes()
    capsys.readouterr()
    bench(config(tmp_path, "sweep", "prefill"))
    after = (tmp_path / "rows.jsonl").read_bytes()
    assert after.startswith(before)
    said = capsys.readouterr().err
    assert "prefill" in said
    assert "sweep" not in said
    with pytest.raises(LabError, match="other options: rounds None there, 5 here"):
        bench(config(tmp_path, "sweep", rounds=5))


def test_a_path_that_is_wrong_is_not_reported_and_the_others_are(preset, without_plot, tmp_path, monkeypatch, capsys):
    wrong = formulations.pad_multiply_add
    monkeypatch.setattr(formulations, "pad_multiply_add", lambda x, coefficients: wrong(x, coefficients) * 1.001)
    with pytest.raises(RunFailedError, match="pad, multiply, add: parity failed: k_hat") as raised:
        bench(config(tmp_path, "op"))
    assert raised.value.exit_code == 3
    rows = read(tmp_path)
    bad = [row for row in rows if row["contestant"] == "pad, multiply, add"]
    assert len(bad) == 2
    assert all("milliseconds" not in row for row in bad)
    assert all("milliseconds" in row for row in rows if row not in bad and "left_out" not in row)
    assert "parity failed" in (tmp_path / "table.md").read_text()
    assert "parity failed" in capsys.readouterr().out
    with pytest.raises(RunFailedError):  # nothing is left to measure, but the failure remains
        bench(config(tmp_path, "op"))


def test_a_path_that_cannot_run_is_said_to_fail(preset, without_plot, tmp_path, monkeypatch):
    def too_large(x, coefficients):
        raise MemoryError("does not fit")

    monkeypatch.setattr(formulations, "appendix_m", too_large)
    with pytest.raises(RunFailedError, match="appendix M: failed: MemoryError: does not fit"):
        bench(config(tmp_path, "op"))
    assert sum("milliseconds" in row for row in read(tmp_path)) > 5


@pytest.mark.parametrize("part", ["layer", pytest.param("train", marks=pytest.mark.slow), "prefill", "decode"])
@pytest.mark.usefixtures("preset", "without_plot")
def test_a_model_whose_shift_is_wrong_at_first_tokens_is_not_reported(part, tmp_path, monkeypatch):
    whole = KVShift.forward

    def wrong(self, q, k, v, **options):
        q, k_hat, v_hat, state = whole(self, q, k, v, **options)
        if self.targets and options.get("backend", "auto") == "auto" and k.shape[1] > 1:
            v_hat = torch.cat([v_hat[:, :1] * 1.5, v_hat[:, 1:]], dim=1)
        return q, k_hat, v_hat, state

    monkeypatch.setattr(KVShift, "forward", wrong)
    with pytest.raises(RunFailedError, match="kv shift: parity failed"):
        bench(config(tmp_path, part))
    wrong_rows = [row for row in read(tmp_path) if "problem" in row]
    assert {row["contestant"] for row in wrong_rows} == {"kv shift"} | (
        {"kv shift, plain operations"} if part == "train" else set()
    )


def test_memory_of_a_layer_is_what_two_layers_take_beyond_one(preset, without_plot, tmp_path, monkeypatch):
    tiny = {**SMOKE.models[0].fields, "num_key_value_heads": 2}
    monkeypatch.setattr("kvshift_lab.benchmarks.memory.SIZES", {"tiny": tiny})
    preset(dataclasses.replace(TINY, memory=(("tiny", 37),)))
    bench(config(tmp_path, "memory"))
    rows = read(tmp_path)
    saved = {row["contestant"]: row["saved_bytes"] for row in rows}
    assert list(saved) == ["transformers' Llama", "without shift", "kv shift"]
    raw = 2 * 37 * 2 * 8 * 2  # k and v, (37, 2, 8) in bfloat16
    assert saved["kv shift"] - saved["without shift"] in range(raw, raw + 200)
    assert [row["saved_more"] for row in rows] == [size / saved["transformers' Llama"] - 1 for size in saved.values()]
    for row in rows:
        assert row["peak_bytes"] >= row["saved_bytes"], "what is kept is held when backward begins"
        assert row["peak_more"] == row["peak_bytes"] / rows[0]["peak_bytes"] - 1


def test_layers_that_fit_follow_the_memory_of_the_device(monkeypatch):
    size = PRESETS["paper"].models[0]
    session = command._session(BenchConfig(preset="paper", device="cpu"), torch.device("cpu"))
    session = dataclasses.replace(session, device=torch.device("cuda", 0))
    fields = language_model.model_fields(size)

    def layers(gib):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib * 2**30, gib * 2**30))
        return language_model._fitting_layers(session, size, fields)

    assert layers(1) == 1
    assert 1 < layers(40) < layers(80) < 32
    assert layers(1000) == 32
    assert language_model._fitting_layers(dataclasses.replace(session, layers=5), size, fields) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ()}, r"parts must be some of op, layer, .*, got \[\]"),
        ({"parts": ("op", "speed")}, r"parts must be some of .*, got \['op', 'speed'\]"),
        ({"preset": "large"}, "preset must be one of smoke, laptop, paper, got 'large'"),
        ({"rounds": 0}, "rounds must be 1 or more, got 0"),
        ({"layers": -1}, "layers must be 1 or more, got -1"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(LabError, match=message):
        bench(BenchConfig(**options))


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LabError, match="finds no CUDA device"):
        bench(BenchConfig(device="cuda"))
