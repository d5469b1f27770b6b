"""Selective attention summed along the keys: as in the code that the KV-shift paper names for its Table 13."""

from kvshift.lab.variants import selective
from kvshift.lab.variants.variant import ModelVariant

__all__ = ["VARIANT"]

VARIANT = ModelVariant(name="selective-key", models=selective.VARIANT.models, fields={"axis": "key"})
