"""From the options of a model to fields of `KVShiftLlamaConfig`, without transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvshift.lab.core.errors import LabError
from kvshift.lab.training.train_config import ModelConfig
from kvshift.models.paper_sizes import SIZES


def given_fields(options: ModelConfig) -> dict[str, Any]:
    """What the options say of the model themselves; `rope_theta`, which has no field of that name, is left out."""
    names = (field.name for field in fields(ModelConfig))
    others = ("variant", "size", "config", "freeze_shift", "zero_outputs", "rope_theta")
    return {name: getattr(options, name) for name in names if name not in others and getattr(options, name) is not None}


def size_fields(options: ModelConfig) -> dict[str, Any]:
    """What the size says, or else the default shape, of the width that the options ask for."""
    if options.size is not None:
        if options.size not in SIZES:
            raise LabError(f"model.size must be one of {', '.join(SIZES)}, got {options.size!r}")
        return dict(SIZES[options.size])
    width = options.hidden_size or 128
    return {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": -(-width * 8 // (3 * 32)) * 32,
    }
