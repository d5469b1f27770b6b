"""The paper's model sizes, as fields of `KVShiftLlamaConfig`: plain numbers, importable without torch."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

_LARGE = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}

# (hidden_size, layers, heads, KV heads, MLP width, context, vocabulary); the head size is always 128.
_TABLE_16 = {
    "1.5B": (2048, 28, 16, 16, 5504, 2048, 36_000),
    "2.9B": (2560, 32, 20, 4, 8704, 4096, 48_000),
    "6.7B": (4096, 32, 32, 32, 11_008, 2048, 36_000),
    "13B": (5120, 40, 40, 40, 13_824, 2048, 36_000),
    "19B": (6144, 48, 48, 4, 16_384, 12_288, 48_000),
}

SIZES: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        # Tables 6 to 13: the BlaGPT setting, with biases in all linear layers except the head.
        "0.2B": {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "intermediate_size": 3072,
            "max_position_embeddings": 4096,
            "vocab_size": 50_304,
            "rms_norm_eps": 1e-8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "attention_bias": True,
            "mlp_bias": True,
            "qk_norm": True,
            "tie_word_embeddings": True,
        },
        **{
            name: {
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "intermediate_size": mlp,
                "max_position_embeddings": context,
                "vocab_size": vocabulary,
                **_LARGE,
            }
            for name, (hidden, layers, heads, kv_heads, mlp, context, vocabulary) in _TABLE_16.items()
        },
    }
)
"""Configuration fields of the paper's models, by size, such as "1.5B"; `size_config` makes configurations of them."""
