"""A run so small that a test takes a fraction of a second, and functions that read and compare runs."""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kvshift_lab.data.config import DataConfig
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.variants.model_config import ModelConfig

TIMES = ("seconds", "step_seconds", "peak_memory_bytes")
LENGTH = 37


def write_corpus(path: Path, seed: int = 0) -> Path:
    """Write 43 documents of words drawn from a small vocabulary, so that there is something to learn."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 5))) for _ in range(50)]
    lines = [json.dumps({"text": " ".join(chance.choices(words, k=chance.randint(5, 300)))}) for _ in range(43)]
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny(corpus: Path, out: Path, *, data: Mapping[str, Any] = {}, model: Mapping[str, Any] = {}, **changes: Any):
    """Return options: 12 steps of 4 sequences of 37 tokens, logged each step, evaluated every 5th, saved every 4th."""
    vocabulary = {} if "tokenizer" in data else {"vocab_size": 281}
    config = TrainConfig(
        out=out,
        data=DataConfig(**{"corpus": str(corpus), "sequence_length": LENGTH, **vocabulary, **data}),
        model=ModelConfig(**{"hidden_size": 24, "num_attention_heads": 2, **model}),
        steps=12,
        batch_size=4,
        eval_rows=11,
        eval_every=5,
        save_every=4,
        log_every=1,
        report_to=(),
        device="cpu",
        progress=False,
    )
    return replace(config, **changes)


def metrics(out: Path, kind: str | None = None, *, times: bool = False) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, by default without measured times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if times or name not in TIMES}
        for line in lines
        if kind in (None, line["kind"])
    ]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out, "train")]


def result(out: Path) -> dict[str, Any]:
    """Return result.json without measured times."""
    values = json.loads((out / "result.json").read_text())
    return {name: value for name, value in values.items() if name not in TIMES}


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def assert_same_bits(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name].view(torch.int32), tensor.view(torch.int32)), name


def assert_same_run(got: Path, expected: Path) -> None:
    """Assert that weights, lines and result of two finished runs are equal to the last bit."""
    assert_same_bits(weights(got), weights(expected))
    assert metrics(got) == metrics(expected)
    assert result(got) == result(expected)


BEFORE_THE_END = ("result.json", "model", "checkpoint-12")


def copied(finished: Path, tmp_path: Path, *, without: tuple[str, ...] = ("result.json",)) -> Path:
    """Copy the folder of a run with all checkpoints but no result, or without other files and folders."""
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    for path in (out / name for name in without):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return out


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Make writes beyond `size` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
