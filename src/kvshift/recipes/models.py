"""The models that recipes compare: their sizes and their names."""

from __future__ import annotations

from kvshift.lab.training.train_config import ModelConfig

__all__ = ["model_label", "sized"]


def model_label(layers: int, shifted: bool) -> str:
    """What figures and tables call the model."""
    return f"{'KV-shift' if shifted else 'vanilla'}, {layers} layer{'s' if layers > 1 else ''}"


def sized(width: int, layers: int, shifted: bool, *, heads: int) -> ModelConfig:
    """A Llama of the paper's proportions: F = ceil(8 E / 3), rounded up to a multiple of 8.

    That makes the sizes of Figure 9 come out exactly; the paper does not state F.
    """
    return ModelConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=-(-8 * width // 24) * 8,
        tie_word_embeddings=False,
        rope_theta=10_000,
        shift_targets=("k", "v") if shifted else (),
    )
