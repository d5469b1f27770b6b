"""Every family gives the answers of transformers, in one engine with chunks, hits and preemptions at once."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvshift.models import baichuan_m1  # noqa: F401  # registers its classes
from kvshift.models.retrofit import add_kv_shift, load_kv_shift

from .engines import count, different, drawn, engine
from .tiny_models import SIZES

Checkpoint = Callable[[str], Path]


LLAMAS = (
    "llama-window-3-linear",
    "llama-keys-gate-llama3",
    "llama-yarn",
    "llama-dynamic",
    "llama-values-clamp-qk-norm",
    "llama-vanilla",
)


@pytest.mark.parametrize("name", [*LLAMAS, "llama-retrofit", "mistral", "qwen2", "qwen3"])
def test_full_attention(name: str, checkpoint: Checkpoint) -> None:
    all_at_once(checkpoint(name), load_kv_shift(checkpoint(name)))


@pytest.mark.parametrize(("name", "blocks"), [("llama-sliding", 12), ("mistral-sliding", 24)])
def test_a_window_of_all_layers(name: str, blocks: int, checkpoint: Checkpoint) -> None:
    """Raw rows lie in the blocks that attention keeps for its window."""
    all_at_once(checkpoint(name), load_kv_shift(checkpoint(name)), blocks)


@pytest.mark.parametrize("name", ["qwen2-sliding", "qwen3-sliding", "baichuan-m1"])
def test_layers_of_different_windows(name: str, checkpoint: Checkpoint) -> None:
    """The pages of all layers are equally large."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(name))
    all_at_once(checkpoint(name), model, blocks=30)


def test_half_precision_weights_of_baichuan_m1_in_float32(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The scaled rows of the LM head are not rounded to the dtype of the checkpoint."""
    AutoModelForCausalLM.from_pretrained(checkpoint("baichuan-m1"), dtype=torch.bfloat16).save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with engine(tmp_path) as running:
        outputs = running.generate(drawn(*range(1, 120, 9), seed=5))
    assert different(model.eval(), outputs) == []


def test_an_added_shift_that_is_not_trained_yet_gives_the_answers_of_the_stock_model(tmp_path: Path) -> None:
    torch.manual_seed(7)
    stock: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES | {"hidden_size": 128, "vocab_size": 277}))
    add_kv_shift(deepcopy(stock)).save_pretrained(tmp_path / "shifted")
    with engine(tmp_path / "shifted", max_num_batched_tokens=48, max_num_seqs=16) as running:
        outputs = running.generate(drawn(*range(1, 120, 3), seed=3, vocabulary=277))
    assert different(stock.eval(), outputs) == []


def all_at_once(folder: Path, model: Any, blocks: int = 24) -> None:
    """Compare answers to prompts of mixed lengths with common starts, twice: in chunks, with hits and preemptions."""
    start, *ends = drawn(70, *range(1, 40, 4), seed=13)
    prompts = [[*start, *end] for end in ends] + drawn(1, 2, 3, 31, 32, 33, 63, 64, 65, 130, 200, 300, seed=14)
    with engine(folder, max_num_batched_tokens=48, max_num_seqs=16, num_gpu_blocks_override=blocks) as running:
        outputs = [output for _ in range(2) for output in running.generate(prompts, tokens=24)]
        assert max(running.chunks(output) for output in outputs) > 6
        assert running.preemptions > 0
        assert running.free_blocks == blocks - 1  # all but the null block
    assert max(count(outputs)) >= 64
    assert different(model.eval(), outputs) == []
