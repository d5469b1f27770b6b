"""The tables of the page on serving, made from rows written by hand."""

from __future__ import annotations

from typing import Any

from kvshift_lab.benchmarks.serving_page import BASELINE, CONTROL, render_tables

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
    table = render_tables([], rows).splitlines()
    assert table[4:8] == [
        "| prompts | 16 | 512, 1 | 4,096 tokens/s | 3,901 tokens/s | 1.050 (1.010 to 1.090) | 1.010 (0.990 to 1.020) |",
        "| both | 16 | 256, 64 | 256 tokens/s | 256 tokens/s | 1.000 (0.980 to 1.020) | 1.010 (0.990 to 1.020) |",
        "| one stream | 1 | 4, 64 | 32 tokens/s | 30 tokens/s | 1.050 (1.040 to 1.060) | 1.010 (0.990 to 1.020) |",
        "| first token | 1 | 512, 1 | 0.250 s | 0.300 s | 1.200 (1.100 to 1.300) | 1.010 (0.990 to 1.020) |",
    ]
    assert "commit 01234567, 2026-11-23" in "\n".join(table)
    assert render_tables([], rows[::-1]).splitlines()[7:3:-1] == table[4:8]  # the order of engines does not matter
    assert "1.050 (1.010 to 1.090) |  |" in render_tables([], rows[:2])  # a file without a control


def test_capacity() -> None:
    rows = [*capacity("KVShiftLlama", 16, 0.0588), *capacity("KVShiftLlama", 128, 0.0078), *capacity("Qwen3", 16, 0.03)]
    table = render_tables(rows, []).splitlines()
    assert table[:5] == [
        "| model | block size | bytes per token | of them raw | by hand | 128 tokens | 2,048 tokens |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| KVShiftLlama | 16 | 24,768 | 192 | 192 | 5.88 %, 11.76 % | 5.88 %, 11.76 % |",
        "| KVShiftLlama | 128 | 24,768 | 192 | 192 | 0.78 %, 1.56 % | 0.78 %, 1.56 % |",
        "| Qwen3 | 16 | 24,768 | 192 | 192 | 3.00 %, 6.00 % | 3.00 %, 6.00 % |",
    ]
