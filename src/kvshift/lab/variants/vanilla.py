"""The family's own model, where nothing shifts: of the Llamas transformers' Llama."""

from kvshift.lab.variants.variant import ModelVariant

__all__ = ["VARIANT"]

VARIANT = ModelVariant(name="vanilla")
