"""Weights of 8 bits: those of the projections. Coefficients and raw keys and values stay as they are.

The model beside it is transformers'. With integers its projections call vLLM's kernel, and do not compute with the
numbers that the weights stand for: on a processor without VNNI oneDNN's sums of products overflow, in vLLM's own models
too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import _custom_ops as ops

from kvshift.models.retrofit import load_kv_shift

from .engines import compared, count, drawn, engine

Checkpoint = Callable[[str], Path]

KINDS = {"int": torch.int8, "float": torch.float8_e4m3fn}


def config_of(kind: str) -> dict[str, Any]:
    """As llm-compressor writes it: a scale for each output, and for the input of each token."""
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def quantize(folder: Path, out: Path, kind: str) -> Any:
    """Write the model with quantized projections to `out`; returns it in transformers."""
    shutil.copytree(folder, out)
    model, weights = load_kv_shift(folder).eval(), load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            weight, scale = eight_bits(module.weight.detach(), kind)
            weights |= {f"{name}.weight": weight, f"{name}.weight_scale": scale}
            project = {"int": by_the_kernel, "float": by_the_numbers}[kind]
            module.forward = project(weight, scale, module.bias)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(fields | {"quantization_config": config_of(kind)}))
    return model


def eight_bits(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Numbers of 8 bits, and the scale of each row: its largest number is the largest of that kind."""
    scale = x.abs().amax(-1, keepdim=True) / (127 if kind == "int" else torch.finfo(KINDS[kind]).max)
    numbers = x / scale
    return (numbers.round() if kind == "int" else numbers).to(KINDS[kind]), scale


def by_the_numbers(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A projection from floating-point numbers of 8 bits, (out, in), multiplied and added up in float32."""

    def project(x: Tensor) -> Tensor:
        numbers, scales = eight_bits(x, "float")
        return F.linear(numbers.float(), weight.float()) * scales * scale.t() + (0 if bias is None else bias)

    return project


def by_the_kernel(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A projection from integers of 8 bits, (out, in)."""
    handler = ops.create_onednn_scaled_mm(weight.t(), scale, torch.float32, True, False, 32)

    def project(x: Tensor, _owned: Tensor = scale) -> Tensor:  # the kernel reads the scales where they are
        numbers, scales, _ = ops.onednn_scaled_int8_quant(x.reshape(-1, x.shape[-1]), None, None, True)
        out = torch.empty(numbers.shape[0], weight.shape[0])
        ops.onednn_scaled_mm(handler, numbers, out, scales, None, None, bias)
        return out.view(*x.shape[:-1], -1)

    return project


@pytest.mark.parametrize(("name", "kind"), [("llama-retrofit", "int"), ("qwen3", "int"), ("qwen3", "float")])
def test_weights_of_8_bits(name: str, kind: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In chunks and with hits in the prefix cache.

    Now and then an input lies so near the middle between two numbers of 8 bits that its last bit decides which it
    becomes. So some probabilities are further off than in a model that is not quantized; the tokens are the same.
    """
    model = quantize(checkpoint(name), tmp_path / "quantized", kind)
    start, *ends = drawn(70, *range(1, 40, 3), seed=13)
    with engine(tmp_path / "quantized", max_num_batched_tokens=48) as running:
        outputs = [output for _ in range(2) for output in running.generate([[*start, *end] for end in ends], tokens=24)]
        assert max(running.chunks(output) for output in outputs) > 1
    assert max(count(outputs)) >= 64
    found = [compared(model, output) for output in outputs]
    likeliest, errors = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert likeliest.all()
    assert errors.median() < 1e-5
    assert errors.max() < 0.1
