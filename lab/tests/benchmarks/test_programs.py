"""The programs in benchmarks/: rows from options; what is wrong or cannot run is named and not timed."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from kvshift import KVShift
from kvshift_lab.recipes.which_mixing import study as which_mixing
from kvshift_lab.variants.by_name import VARIANTS

from .scripts import script

timing, kv_shift, layer, model, memory = map(script, ("timing", "kv_shift", "layer", "model", "memory"))
mixing = script("mixing")
PROGRAMS = {"kv_shift": kv_shift, "layer": layer, "model": model, "memory": memory, "mixing": mixing}
OP = {"shapes": [(2, 13, 3, 4)], "dtypes": ["float32"], "rounds": 2}
SWEEP = {"base": (1, 8, 1, 4), "axes": {"T": (8, 16)}, "swept": ["float32"]}
LAYER = ([((2, 11, 12), 3, 3, "float32")], 2)
MODEL = ([("tiny Llama", {**model.TINY, "num_hidden_layers": 1}, (2, 7), 3)], "float32", 2)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Measure the smallest sizes, and leave the allocator as it is."""
    monkeypatch.setattr(timing, "retain_freed_memory", lambda: False)
    monkeypatch.setitem(kv_shift.SIZES, "smoke", OP | SWEEP)
    monkeypatch.setitem(layer.SIZES, "smoke", LAYER)
    monkeypatch.setitem(model.SIZES, "smoke", MODEL)
    monkeypatch.setattr(memory, "TOKENS", {"smoke": {"tiny": 37}})
    monkeypatch.setattr(memory, "SIZES", {"tiny": {**model.TINY, "num_key_value_heads": 2}})


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(name, *given):
        monkeypatch.setattr(sys, "argv", [name, *given, "--preset", "smoke", "--device", "cpu", "--out", str(tmp_path)])
        try:
            PROGRAMS[name].main()
        finally:
            lines = (tmp_path / "rows.jsonl").read_text().splitlines() if (tmp_path / "rows.jsonl").exists() else []
            run.rows = [json.loads(line) for line in lines]
        return run.rows

    return run


@pytest.mark.slow
def test_every_program_leaves_rows_that_the_report_reads(run, tmp_path):
    for name in ("kv_shift", "layer", "model", "memory"):
        run(name)
    run("kv_shift", "--sweep")
    rows = [row for row in run.rows if "left_out" not in row]
    assert {row["part"] for row in rows} == {"op", "layer", "train", "prefill", "decode", "memory", "sweep"}
    assert not [row for row in rows if "problem" in row]
    left_out = {row["contestant"]: row["left_out"] for row in run.rows if "left_out" in row}
    assert left_out["kv_shift, triton"] == "needs a CUDA device"
    assert "--no-compile" in left_out["kv_shift, compiled"]
    for row in rows:
        assert (
            (row["ratio"] == row["ratio_low"] == row["ratio_high"] == 1) or row["contestant"] != row["baseline"]
            if row["part"] != "memory"
            else row["saved_bytes"] > 0
        )
        assert row["commit"] == rows[0]["commit"]
        assert row["hardware"]["threads"] == torch.get_num_threads()
        assert row["options"]["preset"] == "smoke"
    assert {row["baseline"] for row in rows} == {
        "copy of k and v",
        "without shift",
        "transformers' Llama",
        "kv shift, plain operations",
    }
    operator = [row for row in rows if row["part"] == "op" and row["contestant"] == "kv_shift"]
    element = 2 * 13 * 3 * 4 * 4  # bytes of k
    assert [row["moved_bytes"] for row in operator] == [2 * 2 * element, 5 * 2 * element]
    assert [row["peak_bytes"] // (2 * element) for row in operator] == [1, 2], "results; with gradients of k and v"
    script("report").write(tmp_path)
    table = (tmp_path / "table.md").read_text()
    for text in ("## Operator", "## Training", "## Cost against", "| along |", "smoke only shows that everything runs"):
        assert text in table
    assert (tmp_path / "plot.svg").exists()


@pytest.mark.slow
def test_ways_of_mixing_are_timed_beside_vanilla(run):
    rows = run("mixing")
    assert not [row for row in rows if "problem" in row]
    for part in ("train", "decode"):
        names = [row["contestant"] for row in rows if row["part"] == part]
        assert names == [VARIANTS[name].label for name in mixing.NAMES] + [mixing.PLAIN]
    assert {row["baseline"] for row in rows} == {"vanilla"}
    assert {str(arm.variant) for arm in which_mixing.ARMS} == {*mixing.NAMES}, "those that the recipe trains"


def test_a_second_call_measures_what_is_missing_and_nothing_else(run, tmp_path, capsys):
    run("kv_shift", "--sweep")
    before = (tmp_path / "rows.jsonl").read_bytes()
    capsys.readouterr()
    run("kv_shift", "--sweep")
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert "sweep" not in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"has rows with other options: .*'rounds': None"):
        run("kv_shift", "--sweep", "--rounds", "5")
    run("model", "prefill", "--rounds", "1")  # another part may have other options
    assert (tmp_path / "rows.jsonl").read_bytes().startswith(before)


def test_a_wrong_and_a_failing_implementation_are_named_and_the_others_timed(run, monkeypatch):
    def too_large(x, coefficients):
        raise MemoryError("does not fit")

    right = kv_shift.pad_multiply_add
    monkeypatch.setattr(kv_shift, "pad_multiply_add", lambda x, coefficients: right(x, coefficients) * 1.001)
    monkeypatch.setattr(kv_shift, "appendix_m", too_large)
    for _ in range(2):  # the second call has nothing left to measure, but the failure remains
        with pytest.raises(SystemExit) as raised:
            run("kv_shift")
        assert "pad, multiply, add: parity failed: k_hat: " in str(raised.value)
        assert "appendix M: failed: MemoryError: does not fit" in str(raised.value)
    bad = [row for row in run.rows if row["contestant"] in ("pad, multiply, add", "appendix M")]
    assert len(bad) == 4
    assert all("milliseconds" not in row for row in bad)
    assert all("milliseconds" in row for row in run.rows if row not in bad and "left_out" not in row)


@pytest.mark.parametrize(
    "given", [("layer",), ("model", "train"), ("model", "prefill"), ("model", "decode")], ids=lambda given: given[-1]
)
def test_a_model_whose_shift_is_wrong_at_first_tokens_is_not_timed(given, run, monkeypatch):
    whole = KVShift.forward

    def wrong(self, q, k, v, **options):
        q, k_hat, v_hat, state = whole(self, q, k, v, **options)
        if self.targets and options.get("backend", "auto") == "auto" and k.shape[1] > 1:
            v_hat = torch.cat([v_hat[:, :1] * 1.5, v_hat[:, 1:]], dim=1)
        return q, k_hat, v_hat, state

    monkeypatch.setattr(KVShift, "forward", wrong)
    with pytest.raises(SystemExit, match="kv shift: parity failed"):
        run(*given)
    assert {row["contestant"] for row in run.rows if "problem" in row} == {"kv shift"}


def test_memory_of_a_layer_is_what_two_layers_take_beyond_one(run):
    rows = run("memory")
    saved = {row["contestant"]: row["saved_bytes"] for row in rows}
    assert list(saved) == ["transformers' Llama", "without shift", "kv shift"]
    raw = 2 * 37 * 2 * 8 * 2  # k and v, (37, 2, 8) in bfloat16
    assert saved["kv shift"] - saved["without shift"] in range(raw, raw + 200)
    for row in rows:
        assert row["saved_more"] == row["saved_bytes"] / rows[0]["saved_bytes"] - 1
        assert row["peak_bytes"] >= row["saved_bytes"], "what is kept is held when backward begins"
        assert row["peak_more"] == row["peak_bytes"] / rows[0]["peak_bytes"] - 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("model", "speed"), "parts must be some of train, prefill, decode, got speed"),
        (("model", "--layers", "-1"), "argument --layers: must be a number from 1 on, got -1"),
        (("layer", "--rounds", "0"), "argument --rounds: must be a number from 1 on, got 0"),
    ],
)
def test_bad_options_are_named(given, message, run, capsys):
    with pytest.raises(SystemExit):
        run(*given)
    assert message in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = timing.arguments("x").parse_args(["--device", "cuda", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="PyTorch finds no CUDA device"):
        timing.Benchmark(options)
