"""From the options of a model to fields of `KVShiftLlamaConfig`, without transformers."""

from __future__ import annotations

from typing import Any

from kvshift.lab.core.errors import LabError
from kvshift.lab.variants.model_config import ModelConfig, model_fields
from kvshift.models.paper_sizes import SIZES


def given_fields(options: ModelConfig) -> dict[str, Any]:
    """What the options say of the model themselves; `rope_theta`, which has no field of that name, is left out."""
    return {name: value for name in model_fields() if (value := getattr(options, name)) is not None}


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
