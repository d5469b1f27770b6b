"""The sizes of the models that recipes compare."""

from __future__ import annotations

from kvshift.models.llama import KVShiftLlamaConfig
from kvshift_lab.core.options import from_json
from kvshift_lab.study.recipe import Record
from kvshift_lab.variants.building import llama_config
from kvshift_lab.variants.by_name import with_variant
from kvshift_lab.variants.model_config import ModelConfig


def paper_proportions(width: int, layers: int, variant: str, *, heads: int) -> ModelConfig:
    """Return a Llama with the paper's proportions: F = 8 E / 3, rounded up to a multiple of 8.

    With this F, the model sizes of Figure 9 are exact; the paper does not state F.
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


def llama_config_from_record(record: Record) -> KVShiftLlamaConfig:
    """Return the configuration of a model trained on text, from its record."""
    model = from_json(ModelConfig, {**record.options["model"], "size": None, "config": None})
    tokens, length = record.options["data_facts"]["tokens"], record.options["data"]["sequence_length"]
    return llama_config(model, vocab_size=tokens, sequence_length=length)
