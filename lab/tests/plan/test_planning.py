"""`kvshift plan`: what it adds to the formulas of `kvshift_lab.plan.cost`, and its messages on wrong options."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshift.models.llama import SIZES, KVShiftLlamaConfig, size_config
from kvshift_lab.cli import main
from kvshift_lab.core.errors import LabError
from kvshift_lab.plan import planning
from kvshift_lab.plan.cost import LlamaShape, count_parameters, training_flops, training_memory
from kvshift_lab.plan.plan_config import PlanConfig, PlanData
from kvshift_lab.plan.planning import DEVICES, estimate, plan
from kvshift_lab.variants.building import llama_config
from kvshift_lab.variants.model_config import ModelConfig

from ..run_cases import LENGTH as RUN_LENGTH
from ..run_cases import tiny as tiny_run

TINY = ModelConfig(hidden_size=40, num_hidden_layers=3, num_attention_heads=5, vocab_size=211)
SMALL = PlanConfig(model=TINY, data=PlanData(sequence_length=64), batch_size=7, tokens=44_800)


def one(config: PlanConfig) -> Any:
    (result,) = estimate(config)
    return result


def test_without_a_model_every_size_of_the_paper() -> None:
    rows = estimate(PlanConfig())
    assert [row.model for row in rows] == list(SIZES)
    assert [row.parameters for row in rows] == [count_parameters(size_config(name)) for name in SIZES]
    assert [row.sequence_length for row in rows] == [SIZES[name]["max_position_embeddings"] for name in SIZES]
    assert [row.tokens for row in rows] == [20 * row.parameters.total for row in rows]


def test_options_that_are_no_shape_go_for_every_size() -> None:
    rows = estimate(PlanConfig(model=ModelConfig(shift_targets=(), vocab_size=64_000)))
    expected = [count_parameters(size_config(name, shift_targets=(), vocab_size=64_000)) for name in SIZES]
    assert [row.parameters for row in rows] == expected


def test_configuration_from_a_file(tmp_path: Path) -> None:
    config = KVShiftLlamaConfig(**{**SIZES["0.2B"], "num_hidden_layers": 5})
    config.save_pretrained(tmp_path)
    (row,) = estimate(PlanConfig(model=ModelConfig(config=tmp_path / "config.json")))
    assert row.parameters == count_parameters(config)
    assert row.sequence_length == config.max_position_embeddings


def test_the_parameters_of_a_run(finished: Path, corpus: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    from_file = PlanConfig(model=tiny_run(corpus, finished, model={"config": finished / "model" / "config.json"}).model)
    by_options = PlanConfig(model=tiny_run(corpus, finished).model, data=PlanData(sequence_length=RUN_LENGTH))
    for config in (by_options, from_file):
        (row,) = estimate(config)
        vocabulary = json.loads((finished / "model" / "config.json").read_text())["vocab_size"]
        spare = 2 * 24 * (1024 - vocabulary) if config is not from_file else 0  # the run's tokenizer is smaller
        assert row.parameters.total - spare == result["parameters"]
        assert row.parameters.shift == result["shift_parameters"]


@pytest.mark.parametrize("size", [None, *SIZES])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shift_targets": (), "vocab_size": 61, "sliding_window": 7},
        {"shift_targets": ("q", "v"), "shift_window": 3, "tie_word_embeddings": True},
        {"shift_constraint": "gate", "qk_norm": True, "num_hidden_layers": 3, "rope_theta": 500.0},
        {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 77},
    ],
    ids=["as it is", "vanilla", "wider", "gate", "shape"],
)
def test_a_plan_is_that_of_the_configuration_that_train_builds(size: str | None, options: dict[str, Any]) -> None:
    """The plan builds no configuration of transformers, whose import takes longer than the plan."""
    made = ModelConfig(size=size, **options)
    for length in (None, 384, 8192):
        shape = planning._shape(made, PlanData(sequence_length=length))
        config = llama_config(made, vocab_size=1, sequence_length=length or 1)
        expected = {field.name: getattr(config, field.name) for field in dataclasses.fields(LlamaShape)}
        if made.vocab_size is None and size is None:
            expected["vocab_size"] = 1024
        if length is None and size is None:
            expected["max_position_embeddings"] = 256
        assert dataclasses.asdict(shape) | {"shift_targets": list(shape.shift_targets)} == expected


@pytest.mark.parametrize(
    "options",
    [
        {"size": "3B"},
        {"vocab_size": 0},
        {"num_hidden_layers": -1},
        {"hidden_size": 100, "num_attention_heads": 3},
        {"hidden_size": 12, "num_attention_heads": 4},
        {"num_key_value_heads": 3},
        {"shift_window": 1},
        {"shift_constraint": "gate", "shift_window": 3},
        {"shift_constraint": "gate", "shift_init": "identity"},
        {"shift_targets": ("k", "k")},
        {"sliding_window": 1},
    ],
    ids=str,
)
def test_a_model_that_train_refuses_is_not_planned(options: dict[str, Any]) -> None:
    made = ModelConfig(**options)
    with pytest.raises(LabError) as refused:
        llama_config(made, vocab_size=1, sequence_length=64)
    with pytest.raises(LabError) as planned:
        estimate(PlanConfig(model=made, data=PlanData(sequence_length=64), devices=1))
    assert str(planned.value) == str(refused.value)


def test_hours_by_hand() -> None:
    """With an MFU of one half, two devices of 3 TFLOP/s give 3e12 FLOP/s."""
    config = replace(SMALL, devices=2, peak_tflops=3.0, mfu=0.5, price_per_hour=1.5)
    row = one(config)
    model = llama_config(TINY, vocab_size=211, sequence_length=64)
    hours = 44_800 * training_flops(model, 64).model / 3e12 / 3600
    assert row.hours == pytest.approx(hours, rel=1e-12)
    assert row.device_hours == pytest.approx(2 * hours, rel=1e-12)
    assert row.cost == pytest.approx(3 * hours, rel=1e-12)
    assert row.tokens_per_step == 2 * 7 * 64
    assert row.steps == 44_800 // (2 * 7 * 64)


def test_steps_are_those_of_train() -> None:
    row = one(replace(SMALL, steps=13, tokens=None))
    assert (row.steps, row.tokens) == (13, 13 * 7 * 64)
    made = one(replace(SMALL, model=ModelConfig(hidden_size=40), data=PlanData(sequence_length=64, vocab_size=523)))
    assert made == one(replace(SMALL, model=ModelConfig(hidden_size=40, vocab_size=523)))


def test_measured_throughput_goes_before_the_peak() -> None:
    row = one(replace(SMALL, tokens_per_second=12_444.444444, peak_tflops=1.0))
    assert row.hours * 3600 == pytest.approx(3.6, rel=1e-6)
    assert row.cost is None


def test_checkpointing_takes_the_recomputed_layers_longer_and_less_memory() -> None:
    plain, checkpointed = one(SMALL), one(replace(SMALL, gradient_checkpointing=True))
    flops = plain.flops_per_token
    assert checkpointed.hours / plain.hours == pytest.approx(1 + flops.recomputed / flops.model, rel=1e-12)
    assert checkpointed.memory.kept < plain.memory.kept


def test_devices_of_the_table() -> None:
    fast, slow = (one(replace(SMALL, gpu=name)) for name in ("H100", "A100"))
    assert slow.hours / fast.hours == pytest.approx(DEVICES["H100"].tflops / DEVICES["A100"].tflops, rel=1e-12)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_several_devices(sharding: Any) -> None:
    row = one(replace(SMALL, devices=4, sharding=sharding))
    weights = 4 * row.parameters.total
    if sharding == "ddp":  # everything on each device, and the buckets that are sent
        assert (row.memory.weights, row.memory.gradients, row.memory.optimizer) == (weights, 2 * weights, 2 * weights)
    else:
        quarter = weights // 4
        assert (row.memory.weights, row.memory.gradients, row.memory.optimizer) == (quarter, quarter, 2 * quarter)
        assert row.memory.copies == 4 * (2 * row.parameters.layer + row.parameters.embedding + 40)
    assert one(replace(SMALL, devices=4)) == one(replace(SMALL, devices=4, sharding="ddp"))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("memory", [0.05, 0.2, 1.0])
def test_largest_batch_is_the_last_that_fits(memory: float, checkpointing: bool) -> None:
    row = one(replace(SMALL, memory=memory, gradient_checkpointing=checkpointing))
    model = llama_config(TINY, vocab_size=211, sequence_length=64)
    fits, next_one = (
        training_memory(model, rows=rows, sequence_length=64, gradient_checkpointing=checkpointing).total
        for rows in (row.largest_batch, row.largest_batch + 1)
    )
    assert row.largest_batch > 0
    assert fits <= 0.9 * memory * 2**30 < next_one


def test_a_model_that_fits_nowhere() -> None:
    row = one(replace(SMALL, memory=0.001))
    assert row.largest_batch == 0
    assert not row.memory_fits
    assert one(replace(SMALL, memory=0.001, batch_size=None, tokens_per_step=640)).batch_size == 1


@pytest.mark.parametrize(
    ("options", "rows", "tokens"),
    [
        ({"batch_size": 6, "tokens_per_step": 6 * 3 * 64}, 6, 6 * 3 * 64),
        ({"batch_size": 6}, 6, 6 * 64),
        ({"batch_size": 6, "devices": 3}, 6, 6 * 3 * 64),
        ({"batch_size": None, "tokens_per_step": 64 * 15}, 15, 64 * 15),
        ({"batch_size": None}, 2048 // 4, 524_288),  # the largest batch that fits does not divide the 8192 sequences
        ({"batch_size": None, "data": PlanData(sequence_length=100), "devices": 3}, 1747, 1747 * 300),
    ],
)
def test_batch_and_step(options: dict[str, Any], rows: int, tokens: int) -> None:
    memory = 0.5 if options == {"batch_size": None} else 20.0
    row = one(replace(SMALL, memory=memory, **options))
    assert (row.batch_size, row.tokens_per_step) == (rows, tokens)
    assert row.batch_size <= max(1, row.largest_batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, r"devices must be 1 or more, got 0"),
        ({"data": PlanData(sequence_length=0)}, r"data\.sequence_length must be 1 or more, got 0"),
        ({"tokens": 0}, r"tokens must be 1 or more, got 0"),
        ({"batch_size": -1}, r"batch_size must be 1 or more, got -1"),
        ({"tokens_per_step": 0}, r"tokens_per_step must be 1 or more, got 0"),
        ({"tokens_per_parameter": 0.0}, r"tokens_per_parameter must be more than 0, got 0.0"),
        ({"memory": -1.0}, r"memory must be more than 0, got -1.0"),
        ({"memory": float("inf")}, r"memory must be more than 0, got inf"),
        ({"peak_tflops": float("nan")}, r"peak_tflops must be more than 0, got nan"),
        ({"tokens_per_second": 0.0}, r"tokens_per_second must be more than 0, got 0.0"),
        ({"price_per_hour": -2.0}, r"price_per_hour must be 0 or more, got -2.0"),
        ({"mfu": 0.0}, r"mfu must be more than 0 and at most 1, got 0.0"),
        ({"mfu": 40.0}, r"mfu must be more than 0 and at most 1, got 40.0"),
        ({"devices": 2, "sharding": "none"}, r"sharding must be ddp or fsdp with 2 devices, got none"),
        ({"bf16": "no"}, r"peak_tflops or tokens_per_second must be given with bf16 no"),
        ({"steps": 0, "tokens": None}, r"steps must be 1 or more, got 0"),
        ({"steps": 7}, r"steps \(7\) and tokens \(44800\) cannot both be given"),
        (
            {"tokens_per_step": 1000},
            r"multiple of 448 = batch_size 7 x data.sequence_length 64 x 1 device\(s\), got 1000",
        ),
        (
            {"tokens_per_step": 1000, "batch_size": None},
            r"multiple of 64 = data.sequence_length 64 x 1 device\(s\), got 1000",
        ),
        ({"model": ModelConfig(), "tokens_per_second": 1e4}, r"tokens_per_second \(10000\) .* one model"),
        ({"model": ModelConfig(config=Path("absent.json"))}, r"model.config: absent.json cannot be read"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        estimate(replace(SMALL, **options))


def test_json_is_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    plan(replace(SMALL, json=True))
    (printed,) = json.loads(capsys.readouterr().out)
    row = one(SMALL)
    assert printed["memory_bytes"]["total"] == row.memory.total
    assert printed["memory_bytes"]["kept"] == row.memory.kept
    assert printed["flops_per_token"]["model"] == row.flops_per_token.model
    assert printed["parameters"]["total"] == row.parameters.total
    assert printed["hours"] == row.hours


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--model.hidden-size", "128", "--model.shift-targets", "k", "--batch-size", "16", "--tokens", "1228800"]
    assert main(["plan", *shape, "--tokens-per-second", "20480", "--memory", "16", "--price-per-hour", "30"]) == 0
    head, models, memory, run = capsys.readouterr().out.split("\n\n")
    assert head == "devices: 1; 16 GiB each; AdamW, bf16; 20,480 tokens/s as measured; 30 per device-hour"
    assert models.splitlines()[-1].split()[:5] == ["as", "given", "0.664", "0.402", "16"]
    # Each number stands below its heading, and each heading above its unit.
    top, units, values = run.splitlines()
    assert top.split() == ["the", "run", "tokens", "tokens", "total", "tokens/s", "time", "device"]
    assert units.split() == ["millions", "per", "step", "steps", "TFLOP", "thousands", "minutes", "minutes", "cost"]
    assert values.split() == ["as", "given", "1.23", "4,096", "300", "4.41", "20.5", "1.00", "1.00", "0.50"]
    assert {line[-4:] for line in (units, values)} == {"cost", "0.50"}
    assert memory.splitlines()[1].split() == ["size", *["GiB"] * 7, "fits", "batch"]


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--devices 240 --sharding fsdp --gradient-checkpointing --price-per-hour 1234.5",
        "--model.size 19B --devices 4096 --sharding fsdp --tokens 9e12 --bf16 no --peak-tflops 67.25",
        "--model.hidden-size 16 --tokens-per-second 123456789 --memory 1.5 --price-per-hour 3",
    ],
)
def test_no_line_is_longer_than_100_columns(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options.replace("9e12", "9000000000000").split()]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_what_the_docs_show_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "choose_a_size.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\n\$ kvshift (plan [^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(shown) == 2
    for command, output in shown:
        assert main(command.split()) == 0
        assert capsys.readouterr().out == output, command
