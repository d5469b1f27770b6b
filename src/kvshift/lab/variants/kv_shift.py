"""KV shift with all its options, which are fields of a size: what is shifted, window, constraint and start values."""

from kvshift.lab.variants.variant import ModelVariant

__all__ = ["VARIANT"]

VARIANT = ModelVariant(name="kv-shift")
