"""`kvshift plan`: estimate the cost of a run before it starts. The formulas are in `cost.py`."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvshift.models.paper_sizes import SIZES
from kvshift_lab.analysis.tables import as_text
from kvshift_lab.core.errors import LabError, require
from kvshift_lab.data.config import DataConfig
from kvshift_lab.plan.cost import (
    CacheSize,
    Flops,
    Llama,
    LlamaShape,
    Memory,
    Parameters,
    cache_size,
    count_parameters,
    training_flops,
    training_memory,
)
from kvshift_lab.plan.plan_config import DeviceName, PlanConfig, PlanData
from kvshift_lab.variants.by_name import resolve_variant
from kvshift_lab.variants.model_config import ModelConfig, explicit_fields, size_fields

_USABLE = 0.9  # share of a device's memory; the CUDA context, fragmentation and communication take the rest
_GIB = 2**30
_WIDTH = 100  # characters per line of the tables
_STEP = 524_288  # tokens per optimizer step; half a million in the paper


class Device(NamedTuple):
    """A GPU: its peak throughput in dense bfloat16 matrix products, in TFLOP/s, and its memory in GiB."""

    tflops: float
    memory: float


# Throughput from the data sheets of NVIDIA and AMD, without sparsity, for the SXM or OAM version if there are several;
# for GeForce with float32 accumulation, from the architecture whitepapers. Memory as reported by the drivers.
DEVICES: dict[DeviceName, Device] = {
    "A100": Device(312, 80),
    "H100": Device(989, 79),
    "H200": Device(989, 140),
    "B200": Device(2250, 179),
    "MI300X": Device(1307, 191),
    "L40S": Device(362, 45),
    "RTX4090": Device(165, 24),
    "RTX5090": Device(209, 31),
}


@dataclass(frozen=True)
class CostEstimate:
    """The estimated cost of training one model.

    Attributes:
        model: Name of the size or configuration file; "as given" for a shape given by options.
        batch_size: Sequences per forward pass and device.
        largest_batch: Maximum number of sequences that fit; 0 if not even one fits.
        memory: Memory of one device at this batch size, in bytes.
        memory_fits: Whether `memory` is at most 90 % of the device's memory.
        tokens_per_second: Throughput of all devices together.
        cost: Cost in the currency of `price_per_hour`; None without a price.
    """

    model: str
    sequence_length: int
    parameters: Parameters
    flops_per_token: Flops
    cache_bytes: CacheSize
    batch_size: int
    largest_batch: int
    memory: Memory
    memory_fits: bool
    tokens: int
    tokens_per_step: int
    steps: int
    tokens_per_second: float
    hours: float
    device_hours: float
    cost: float | None


def plan(config: PlanConfig) -> None:
    """Print the estimated costs of the models of `config`."""
    estimates = estimate(config)
    if config.json:
        print(json.dumps([_as_json(row) for row in estimates], indent=2))
    else:
        print(_as_text(config, estimates))


def estimate(config: PlanConfig) -> list[CostEstimate]:
    """Estimate the costs of the models of `config`.

    Raises:
        LabError: An option is invalid, or the model does not exist.
    """
    _check(config)
    options = resolve_variant(config.model)
    if options.variant is not None:
        raise LabError(f"model.variant must be vanilla or kv-shift for kvshift plan, got {options.variant!r}")
    models = _models(options, config.data)
    if config.tokens_per_second is not None and len(models) > 1:
        raise LabError(
            f"tokens_per_second ({config.tokens_per_second:g}) applies to one model: choose it with model.size, "
            "model.config or the options of its shape"
        )
    return [_estimate(config, name, model) for name, model in models.items()]


def _check(config: PlanConfig) -> None:
    counts = {name: getattr(config, name) for name in ("steps", "tokens", "batch_size", "tokens_per_step", "devices")}
    counts |= {f"data.{name}": value for name, value in vars(config.data).items()}
    for name, value in counts.items():
        require(value is None or value >= 1, name, value, "1 or more")
    if config.steps is not None and config.tokens is not None:
        raise LabError(f"steps ({config.steps}) and tokens ({config.tokens}) cannot both be given")
    for name in ("tokens_per_parameter", "peak_tflops", "memory", "tokens_per_second"):
        value = getattr(config, name)
        require(value is None or 0 < value < math.inf, name, value, "more than 0")
    price = config.price_per_hour
    require(price is None or 0 <= price < math.inf, "price_per_hour", price, "0 or more")
    require(0 < config.mfu <= 1, "mfu", config.mfu, "more than 0 and at most 1")
    if config.sharding == "none" and config.devices > 1:
        raise LabError(f"sharding must be ddp or fsdp with {config.devices} devices, got none")
    if config.precision == "fp32" and config.peak_tflops is None and config.tokens_per_second is None:
        raise LabError("peak_tflops or tokens_per_second must be given with bf16 no: only bfloat16 peaks are built in")


def _models(options: ModelConfig, data: PlanData) -> dict[str, Llama]:
    """Return the model that the options describe, by name; every size of the paper if they give no size or shape."""
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    if options.size is None and options.config is None and all(getattr(options, name) is None for name in shape):
        return {size: _model(replace(options, size=size), data) for size in SIZES}
    name = options.size or (options.config.name if options.config else "as given")
    return {name: _model(options, data)}


def _model(options: ModelConfig, data: PlanData) -> Llama:
    if options.config is None and (shape := _shape(options, data)) is not None:
        return shape
    # Slow to import. It handles all fields of a configuration file, and raises the errors for invalid options.
    from kvshift_lab.variants.building import llama_config

    sequence_length = data.sequence_length
    config = llama_config(options, vocab_size=1, sequence_length=sequence_length or 1)
    if config.vocab_size == 1:  # not given anywhere
        options = replace(options, vocab_size=data.vocab_size)
    if config.max_position_embeddings == 1:
        sequence_length = sequence_length or DataConfig.sequence_length
    return llama_config(options, vocab_size=1, sequence_length=sequence_length or 1)


def _shape(options: ModelConfig, data: PlanData) -> LlamaShape | None:
    """Return the shape of `llama_config`'s result for options without a file; None if it might raise an error."""
    fields = size_fields(options) | explicit_fields(options)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    if any(fields.get(name, 1) < 1 for name in (*sizes, "vocab_size")):
        return None
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    fields.setdefault("num_key_value_heads", heads)
    fields.setdefault("vocab_size", data.vocab_size)
    longest = max(fields.get("max_position_embeddings", 0), data.sequence_length or 0)
    known = [field.name for field in dataclasses.fields(LlamaShape)]
    shape = LlamaShape(
        **{name: value for name, value in fields.items() if name in known and name != "max_position_embeddings"},
        head_dim=width // heads,
        max_position_embeddings=longest or DataConfig.sequence_length,
    )
    targets, window = shape.shift_targets, shape.sliding_window
    regular = (
        width % (2 * heads) == 0
        and heads % shape.num_key_value_heads == 0
        and (options.rope_theta is None or 0 < options.rope_theta < math.inf)
        and (window is None or window > 1)
        and len(set(targets)) == len(targets)
        and shape.shift_window > 1
        and (shape.shift_constraint != "gate" or (shape.shift_window == 2 and options.shift_init != "identity"))
    )
    return shape if regular else None


def _estimate(config: PlanConfig, name: str, model: Llama) -> CostEstimate:
    length = config.data.sequence_length or model.max_position_embeddings
    devices = config.devices
    parameters, flops = count_parameters(model), training_flops(model, length)

    def memory(rows: int) -> Memory:
        return training_memory(
            model,
            rows=rows,
            sequence_length=length,
            precision=config.precision,
            gradient_checkpointing=config.gradient_checkpointing,
            sharding=config.sharding or ("ddp" if devices > 1 else "none"),
            devices=devices,
        )

    budget = _USABLE * _GIB * (config.memory or DEVICES[config.gpu].memory)
    largest = _most_rows(memory, budget)
    batch_size, tokens_per_step = _batch(config, length, largest)
    used = memory(batch_size)

    tokens = config.tokens or round(config.tokens_per_parameter * parameters.total)
    if config.steps is not None:
        tokens = config.steps * tokens_per_step
    done = flops.model + (flops.recomputed if config.gradient_checkpointing else 0)
    peak = 1e12 * (config.peak_tflops or DEVICES[config.gpu].tflops)
    tokens_per_second = config.tokens_per_second or devices * peak * config.mfu / done
    hours = tokens / tokens_per_second / 3600
    return CostEstimate(
        model=name,
        sequence_length=length,
        parameters=parameters,
        flops_per_token=flops,
        cache_bytes=cache_size(model, config.precision),
        batch_size=batch_size,
        largest_batch=largest,
        memory=used,
        memory_fits=used.total <= budget,
        tokens=tokens,
        tokens_per_step=tokens_per_step,
        steps=math.ceil(tokens / tokens_per_step),
        tokens_per_second=tokens_per_second,
        hours=hours,
        device_hours=devices * hours,
        cost=None if config.price_per_hour is None else devices * hours * config.price_per_hour,
    )


def _most_rows(memory: Callable[[int], Memory], budget: float) -> int:
    """Return the largest number of sequences that fits, by bisection: memory grows with every sequence."""
    if memory(1).total > budget:
        return 0
    fits, too_many = 1, 2
    while memory(too_many).total <= budget:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if memory(middle).total <= budget else (fits, middle)
    return fits


def _batch(config: PlanConfig, length: int, largest: int) -> tuple[int, int]:
    """Return the sequences per forward pass and device, and the tokens per optimizer step."""
    of_one_row = length * config.devices
    if config.batch_size is not None:
        at_once = config.batch_size * of_one_row
        tokens = config.tokens_per_step or at_once
        if tokens % at_once:
            raise LabError(
                f"tokens_per_step must be a multiple of {at_once} = batch_size {config.batch_size} x "
                f"data.sequence_length {length} x {config.devices} device(s), got {tokens}"
            )
        return config.batch_size, tokens
    tokens = config.tokens_per_step or max(1, _STEP // of_one_row) * of_one_row
    if tokens % of_one_row:
        raise LabError(
            f"tokens_per_step must be a multiple of {of_one_row} = data.sequence_length {length} x {config.devices} "
            f"device(s), got {tokens}"
        )
    rows = tokens // of_one_row
    return max((n for n in range(1, min(rows, largest) + 1) if rows % n == 0), default=1), tokens


def _as_json(row: CostEstimate) -> dict:
    values = dataclasses.asdict(row)
    values["flops_per_token"]["model"] = row.flops_per_token.model
    values["memory"]["total"] = row.memory.total
    values["memory_bytes"] = values.pop("memory")
    return values


def _as_text(config: PlanConfig, rows: list[CostEstimate]) -> str:
    models = _table(
        {
            "model": [row.model for row in rows],
            "parameters\nmillions": [_short(row.parameters.total / 1e6) for row in rows],
            "non-embed.\nmillions": [_short((row.parameters.total - row.parameters.embedding) / 1e6) for row in rows],
            "KV shift\nnumbers": [f"{row.parameters.shift:,}" for row in rows],
            "length\ntokens": [f"{row.sequence_length:,}" for row in rows],
            "training\nGFLOP/token": [_short(row.flops_per_token.model / 1e9) for row in rows],
            "attention\n%": [f"{100 * row.flops_per_token.attention / row.flops_per_token.model:.1f}" for row in rows],
            "shift\n%": [f"{100 * row.flops_per_token.shift / row.flops_per_token.model:.3f}" for row in rows],
            "cache\nKiB/token": [_short(row.cache_bytes.per_token / 2**10) for row in rows],
            "state\nKiB": [_short(row.cache_bytes.per_sequence / 2**10) for row in rows],
        }
    )
    memories = [row.memory for row in rows]
    memory = _table(
        {
            "one device": [row.model for row in rows],
            "batch\nsize": [f"{row.batch_size:,}" for row in rows],
            "weights\nGiB": [_short(m.weights / _GIB) for m in memories],
            "gradients\nGiB": [_short(m.gradients / _GIB) for m in memories],
            "AdamW\nGiB": [_short(m.optimizer / _GIB) for m in memories],
            "copies\nGiB": [_short(m.copies / _GIB) for m in memories],
            "activations\nGiB": [_short(m.kept / _GIB) for m in memories],
            "working\nGiB": [_short(m.working / _GIB) for m in memories],
            "total\nGiB": [_short(m.total / _GIB) for m in memories],
            "\nfits": ["yes" if row.memory_fits else "NO" for row in rows],
            "largest\nbatch": [f"{row.largest_batch:,}" for row in rows],
        }
    )
    flops = [row.tokens * row.flops_per_token.model for row in rows]
    tokens_in, flops_in = _unit(_COUNTS, [row.tokens for row in rows]), _unit(_FLOPS, flops)
    rate_in, time_in = (
        _unit(_COUNTS, [row.tokens_per_second for row in rows]),
        _unit(_TIMES, [row.hours for row in rows]),
    )
    columns = {
        "the run": [row.model for row in rows],
        f"tokens\n{tokens_in.name}": [_short(row.tokens / tokens_in.size) for row in rows],
        "tokens\nper step": [f"{row.tokens_per_step:,}" for row in rows],
        "\nsteps": [f"{row.steps:,}" for row in rows],
        f"total\n{flops_in.name}": [_short(total / flops_in.size) for total in flops],
        f"tokens/s\n{rate_in.name}": [_short(row.tokens_per_second / rate_in.size) for row in rows],
        f"time\n{time_in.name}": [_short(row.hours / time_in.size) for row in rows],
        f"device\n{time_in.name}": [_short(row.device_hours / time_in.size) for row in rows],
    }
    if config.price_per_hour is not None:
        columns["\ncost"] = [f"{row.cost:,.2f}" for row in rows]
    return "\n\n".join([_assumptions(config), models, memory, _table(columns)])


class _Unit(NamedTuple):
    name: str
    size: float


_COUNTS = [_Unit("billions", 1e9), _Unit("millions", 1e6), _Unit("thousands", 1e3), _Unit("single", 1)]
_FLOPS = [_Unit("EFLOP", 1e18), _Unit("PFLOP", 1e15), _Unit("TFLOP", 1e12), _Unit("GFLOP", 1e9)]
_TIMES = [_Unit("hours", 1), _Unit("minutes", 1 / 60)]


def _unit(units: list[_Unit], values: Sequence[float]) -> _Unit:
    """Return the largest unit in which at least one value is 1 or more; otherwise the smallest unit."""
    return next((unit for unit in units if max(values) >= unit.size), units[-1])


def _assumptions(config: PlanConfig) -> str:
    device = DEVICES[config.gpu]
    measured = config.tokens_per_second is not None
    known = config.peak_tflops is None and not measured
    words = [f"{config.devices} x {config.gpu}" if known else f"devices: {config.devices}"]
    words.append(f"{config.memory or device.memory:g} GiB each")
    if config.devices > 1:
        words.append(config.sharding or "ddp")
    words.append("AdamW, " + config.precision + (", gradient checkpointing" if config.gradient_checkpointing else ""))
    if measured:
        words.append(f"{config.tokens_per_second:,g} tokens/s as measured")
    else:
        words.append(f"{config.peak_tflops or device.tflops:g} TFLOP/s peak, {config.mfu:.0%} of it reached (assumed)")
    if config.price_per_hour is not None:
        words.append(f"{config.price_per_hour:g} per device-hour")
    return textwrap.fill("; ".join(words), _WIDTH)


def _short(number: float) -> str:
    """Format a number with three significant digits, without exponent and with all digits before the point."""
    if number == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{min(digits, 6)}f}"


def _table(columns: Mapping[str, Sequence[str]]) -> str:
    """Format columns with headings of up to two lines, the first column left-aligned, the others right-aligned."""
    first, *others = ([*[""] * (1 - head.count("\n")), *head.split("\n"), *cells] for head, cells in columns.items())
    if not first[0]:
        first[:2] = first[1], ""
    return as_text([*zip(first, *others, strict=True)], width=_WIDTH)
