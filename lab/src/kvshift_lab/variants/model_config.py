"""Options of a model of the Llama family, as used by `kvshift train` and the recipes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import ADDED_LATER, OptionTrait, option_metadata, option_names
from kvshift_lab.variants.by_name import VARIANTS

VARIES_BY_VARIANT = option_metadata(OptionTrait.VARIES_BY_VARIANT)
NOT_IN_MODEL_CONFIG = option_metadata(OptionTrait.NOT_IN_MODEL_CONFIG)

# The dtype in which the weights of a model are loaded; auto: the dtype in which they were saved.
DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama with KV shift. If an option is not given (None), its value comes from `size` or `config` or, if neither
    is given, is the default in its description."""

    family = "llama"
    variant: Annotated[
        str | None,
        tyro.conf.arg(help=f"One of {', '.join(VARIANTS)}. None: kv-shift, configured by shift_*."),
    ] = field(default=None, metadata=ADDED_LATER | VARIES_BY_VARIANT | NOT_IN_MODEL_CONFIG)

    size: str | None = field(default=None, metadata=NOT_IN_MODEL_CONFIG)
    """Model size from the paper: 0.2B, 1.5B, 2.9B, 6.7B, 13B or 19B."""
    config: Path | None = field(default=None, metadata=NOT_IN_MODEL_CONFIG)
    """A JSON file with the fields of KVShiftLlamaConfig, such as the config.json of a saved model."""
    hidden_size: int | None = None
    """Model width E. None: 128."""
    num_hidden_layers: int | None = None
    """Number of layers. None: 2."""
    num_attention_heads: int | None = None
    """Number of query heads H. None: 4."""
    num_key_value_heads: int | None = None
    """Number of KV heads G. None: as many as query heads."""
    intermediate_size: int | None = field(default=None, metadata=VARIES_BY_VARIANT)
    """MLP width F. None: 8/3 of hidden_size, rounded up to a multiple of 32."""
    vocab_size: int | None = None
    """Rows of the embedding, at least as many as the tokenizer has tokens. None: exactly as many."""
    tie_word_embeddings: bool | None = None
    """Use one matrix for the embedding and the output. None: no."""
    qk_norm: bool | None = None
    """Apply an RMSNorm to each query and key head. None: no."""
    attention_bias: bool | None = field(default=None, metadata=ADDED_LATER)
    """Add biases to the projections of attention, as in Qwen2. None: no."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to, itself included. None: all."""
    rope_theta: float | None = field(default=None, metadata=NOT_IN_MODEL_CONFIG)
    """Base of the rotary embedding. None: 10000."""
    shift_targets: tuple[Literal["q", "k", "v"], ...] | None = field(default=None, metadata=VARIES_BY_VARIANT)
    """Which of queries, keys and values to shift; with no value after it, none (the vanilla model). None: k v."""
    shift_window: int | None = field(default=None, metadata=VARIES_BY_VARIANT)
    """Number of tokens that are mixed, the current one included. None: 2."""
    shift_constraint: Literal["free", "gate", "clamp"] | None = field(default=None, metadata=VARIES_BY_VARIANT)
    """free: any numbers. gate: sigmoid(a) and 1 - sigmoid(a). clamp: within [0, 1]. None: free."""
    shift_init: Literal["uniform", "identity"] | None = field(default=None, metadata=VARIES_BY_VARIANT)
    """uniform: U(0, 1), summing to 1. identity: (1, 0), initially no shift. None: uniform."""
    freeze_shift: bool = field(default=False, metadata=VARIES_BY_VARIANT | NOT_IN_MODEL_CONFIG)
    """Keep the coefficients at their initial values."""
    freeze_shift_lags: bool | None = field(default=None, metadata=ADDED_LATER | VARIES_BY_VARIANT | NOT_IN_MODEL_CONFIG)
    """Keep the coefficients of earlier tokens at their initial values and train only that of the current token. From
    the identity, each head thus learns a scale of its keys and one of its values. None: no."""
    zero_outputs: bool | None = field(default=None, metadata=ADDED_LATER | NOT_IN_MODEL_CONFIG)
    """Initialise the output projections of attention and MLP to 0, so that only embedding and head act at first.
    None: no."""


def model_fields() -> list[str]:
    """Return the names of the options that are also fields of the model's configuration."""
    beside = option_names(ModelConfig, OptionTrait.NOT_IN_MODEL_CONFIG)
    return [item.name for item in fields(ModelConfig) if item.name not in beside]


def explicit_fields(options: ModelConfig) -> dict[str, Any]:
    """Return the configuration fields that the options set; `rope_theta`, which is no such field, is not among them."""
    return {name: value for name in model_fields() if (value := getattr(options, name)) is not None}


def size_fields(options: ModelConfig) -> dict[str, Any]:
    """Return the configuration fields of the given size or, without one, of the default shape at the given width."""
    if options.size is not None:
        from kvshift.models.llama import SIZES  # takes seconds, and the options are read without it

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
