"""Adapters at run time: each request of a batch gets the answers of the model into which its adapter is merged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest

from kvshift.models import baichuan_m1  # noqa: F401  # registers its classes
from kvshift.models.retrofit import load_kv_shift

from .engines import count, different, drawn, engine

Checkpoint = Callable[[str], Path]

_RANK, _ALPHA = 8, 16
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(model: Any, folder: Path, projections: Sequence[str], seed: int) -> Any:
    """Write an adapter in PEFT's layout to `folder`, merge it into `model` and return the model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(tuple(projections)):
            out, into = module.weight.shape
            a, b = torch.randn(_RANK, into, generator=generator), torch.randn(out, _RANK, generator=generator)
            a, b = 0.3 * a / into**0.5, 0.3 * b
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += _ALPHA / _RANK * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "target_modules": list(projections),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return model.eval()


@pytest.mark.parametrize("name", ["llama-retrofit", "qwen3"])
def test_two_adapters_and_none_in_one_batch(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Keys and values of adapters are shifted like others, and cached blocks of one adapter never serve another.

    One slot for adapters stays empty: on a CPU, vLLM 0.32.0 applies the last slot to requests without an adapter.
    """
    models = [
        load_kv_shift(checkpoint(name)).eval(),
        adapted(load_kv_shift(checkpoint(name)), tmp_path / "keys", ("k_proj", "v_proj"), 1),
        adapted(load_kv_shift(checkpoint(name)), tmp_path / "all", ALL, 2),
    ]
    adapters = [None, LoRARequest("keys", 1, str(tmp_path / "keys")), LoRARequest("all", 2, str(tmp_path / "all"))]
    start, *ends = drawn(70, *range(1, 40, 3), seed=13)
    prompts = [[*start, *end] for end in ends for _ in models]
    with engine(checkpoint(name), enable_lora=True, max_loras=3, max_lora_rank=8, max_num_batched_tokens=48) as running:
        outputs = [output for _ in range(2) for output in running.generate(prompts, lora_request=adapters * len(ends))]
        assert max(running.chunks(output) for output in outputs) > 1
    assert max(count(outputs)) >= 64
    answers = [[output.outputs[0].token_ids for output in outputs[i :: len(models)]] for i in range(len(models))]
    assert answers[0] != answers[1] != answers[2]
    for i, model in enumerate(models):
        assert different(model, outputs[i :: len(models)]) == []


def test_an_adapter_of_the_packed_projection_of_baichuan_m1_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("baichuan-m1")
    adapted(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "packed", ("W_pack",), 1)
    adapter = LoRARequest("packed", 1, str(tmp_path / "packed"))
    with engine(folder, enable_lora=True, max_lora_rank=8) as running, pytest.raises(ValueError, match="W_pack"):
        running.generate(drawn(20), lora_request=[adapter])
