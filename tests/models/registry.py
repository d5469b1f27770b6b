"""Tiny models of every kind with KV shift: the contracts of this folder are parametrised over them by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from .baichuan_m1 import tiny as baichuan_m1
from .llama.tiny import tiny_model
from .retrofit.tiny_families import FAMILIES, shifted, shifted_gpt2

# The name of this option in transformers 5.23, and in earlier versions.
CHECKPOINTING = next(
    word for word in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, word)
)
Build = Callable[..., PreTrainedModel]  # takes a dtype and options


def baichuan(dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    config = baichuan_m1.config_with(**changes)
    with tempfile.TemporaryDirectory() as folder:
        baichuan_m1.write(Path(folder), config=config)
        return baichuan_m1.load(Path(folder), dtype=dtype, attn_implementation=attention)


LLAMA = {
    "Llama": {},
    "Llama, queries too, window 4": {"shift_targets": ["q", "k", "v"], "shift_window": 4},
    "Llama, values alone": {"shift_targets": ["v"]},
    "Llama, sliding window": {"sliding_window": 5, "qk_norm": True, "shift_window": 3},
    "Llama, no shift": {"shift_targets": []},
    "Llama, no shift, sliding window": {"shift_targets": [], "sliding_window": 5},
}
GPT2 = {
    "GPT-2": {},
    "GPT-2, queries too, window 4": {"targets": ("q", "k", "v"), "window": 4},
    "GPT-2, values alone, gate": {"targets": ("v",), "constraint": "gate", "init": "uniform"},
}
BAICHUAN = {
    "Baichuan-M1": {},
    "Baichuan-M1, two windows": {
        "sliding_window_layers": [0, 1],
        "num_swa_attention_heads": 2,
        "num_swa_key_value_heads": 1,
    },
}
MODELS: dict[str, Build] = {
    name: partial(build, **options)
    for build, variants in ((tiny_model, LLAMA), (shifted_gpt2, GPT2), (baichuan, BAICHUAN))
    for name, options in variants.items()
}
"""Models by name, each of which has formulas to compare with."""

RETROFITTED: dict[str, Build] = {f"{family}, retrofitted": partial(shifted, family) for family in FAMILIES}
"""Models of transformers after `add_kv_shift`."""
