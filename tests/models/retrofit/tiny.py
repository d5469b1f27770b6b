"""A GPT-2 small enough to run hundreds of times, before and after `add_kv_shift`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from kvshift import ShiftOptions
from kvshift.models.retrofit import KVShiftGPT2LMHeadModel, add_kv_shift

from ..llama.tiny import PAD, randomize

# A head size of 12, 3 heads and a width of 36 make all axes distinct. (With a head size that is not a multiple of 4,
# matrix products on a CPU round differently for other strides of the same keys and values.)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "n_positions": 64,
    "n_embd": 36,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 29,
    "bos_token_id": 2,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def tiny_gpt2(
    dtype: torch.dtype = torch.float32, seed: int = 0, attention: str = "sdpa", **options: Any
) -> GPT2LMHeadModel:
    """Return stock GPT-2 with random weights of standard deviation 0.3, in evaluation mode."""
    model = AutoModelForCausalLM.from_config(GPT2Config(**{**SIZES, **options}), attn_implementation=attention)
    randomize(model, seed)
    model.generation_config.pad_token_id = PAD
    return model.to(dtype).eval()


def shifted_gpt2(
    dtype: torch.dtype = torch.float32, seed: int = 0, attention: str = "sdpa", **shift: Any
) -> KVShiftGPT2LMHeadModel:
    """Return the same after `add_kv_shift`, with coefficients drawn from U(-1, 1): different for each head."""
    sizes = {name: shift.pop(name) for name in list(shift) if name in SIZES}
    model = add_kv_shift(tiny_gpt2(dtype, seed, attention, **sizes), ShiftOptions(**{"init": "identity", **shift}))
    randomize(model, seed)
    return model
