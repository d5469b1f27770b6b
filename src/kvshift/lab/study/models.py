"""The models that recipes compare: their sizes and their names."""

from __future__ import annotations

from kvshift.lab.variants.by_name import VARIANTS, with_variant
from kvshift.lab.variants.model_config import ModelConfig


def model_label(layers: int, variant: str) -> str:
    """What figures and tables call the model."""
    return f"{VARIANTS[variant].label}, {layers} layer{'s' if layers > 1 else ''}"


def sized(width: int, layers: int, variant: str, *, heads: int) -> ModelConfig:
    """A Llama of the paper's proportions: F = ceil(8 E / 3), rounded up to a multiple of 8.

    That makes the sizes of Figure 9 come out exactly; the paper does not state F.
    """
    size = ModelConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=-(-8 * width // 24) * 8,
        tie_word_embeddings=False,
        rope_theta=10_000,
    )
    return with_variant(size, variant)
