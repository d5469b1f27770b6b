"""A tiny Qwen3 configuration, for the models on the Hub that examples and notebooks name."""

from __future__ import annotations

from transformers import Qwen3Config


def tiny_qwen3(vocab_size: int = 97) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
