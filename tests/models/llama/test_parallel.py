"""Two processes, each with a part of the model, compute what one process computes with the whole model."""

from pathlib import Path

import pytest
import torch

from ...worker_processes import run_workers
from ..retrofit.tiny_families import shifted
from .tiny import tiny_model

PROCESSES = 2
# Sizes that two processes can divide.
SIZES = {"num_key_value_heads": 2, "intermediate_size": 22, "vocab_size": 62}


def run(tmp_path: Path, *jobs: tuple[str, dict]) -> None:
    arguments = ["-m", "tests.models.llama.parallel_worker", str(tmp_path / "rendezvous")]
    for i, (kind, options) in enumerate(jobs):
        qwen3 = kind == "refused"
        model = shifted("Qwen3", torch.float32, vocab_size=62) if qwen3 else tiny_model(**SIZES, **options)
        model.save_pretrained(tmp_path / str(i))
        arguments.append(f"{kind}={tmp_path / str(i)}")
    run_workers(PROCESSES, arguments)


@pytest.mark.slow
def test_tensor_parallel(tmp_path):
    variants = [
        {},
        {"shift_targets": ["q", "k", "v"], "shift_window": 3, "qk_norm": True},
        {"shift_constraint": "gate", "tie_word_embeddings": True},
    ]
    run(tmp_path, *[("tensor", options) for options in variants], ("refused", {}))


@pytest.mark.slow
def test_data_parallel(tmp_path):
    run(tmp_path, ("data", {"shift_window": 3}), ("shards", {"shift_window": 3}))
