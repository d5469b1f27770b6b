"""A model small enough to run hundreds of times, with weights so large that a wrong state changes its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from kvshift import KVShift
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

PAD = 1  # its embedding is not zero, unlike the row of `nn.Embedding(padding_idx=...)`

# A hidden_size of 7 per head (Llama requires a multiple of the heads) and a head size of 10 make all axes distinct.
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 42,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "bos_token_id": 2,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_config(**options: Any) -> KVShiftLlamaConfig:
    return KVShiftLlamaConfig(**{**SIZES, **options})


def tiny_model(
    dtype: torch.dtype = torch.float32, seed: int = 0, attention: str = "sdpa", **options: Any
) -> KVShiftLlamaForCausalLM:
    """Return a model with these configuration options and weights of standard deviation 0.3, in evaluation mode."""
    model = AutoModelForCausalLM.from_config(tiny_config(**options), attn_implementation=attention)
    randomize(model, seed)
    model.generation_config.pad_token_id = PAD  # for generate only: the embedding has no padding index
    return model.to(dtype).eval()


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    """Draw weights and biases from N(0, 0.3), norms from N(1, 0.3), coefficients from U(-1, 1): heads differ."""
    generator = torch.Generator().manual_seed(seed)
    coefficients = {id(p) for m in model.modules() if isinstance(m, KVShift) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in coefficients:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 2 - 1)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm" in name))


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    """Return tokens other than padding."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(2, SIZES["vocab_size"], shape, generator=generator)


def left_padded(rows: list[Tensor], pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Return sequences of unequal length as one batch, padded on the left, with its attention mask."""
    return _padded(rows, pad, "left")


def right_padded(rows: list[Tensor], pad: int = PAD) -> tuple[Tensor, Tensor]:
    return _padded(rows, pad, "right")


def _padded(rows: list[Tensor], pad: int, side: str) -> tuple[Tensor, Tensor]:
    ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side=side)
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)


@torch.no_grad()
def draw_adapter(model: nn.Module, size: float) -> None:
    """Draw random weights for LoRA: PEFT's own initialization changes nothing."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
