"""Table 15: multi-head latent attention with and without a hard shift."""

from __future__ import annotations

from kvshift_lab.recipes.language_models.lm_tables import table_recipe
from kvshift_lab.recipes.tab15 import ENTRY

RECIPE = table_recipe(
    ENTRY,
    ["mla-kv-shift", "mla"],
    better="mla-kv-shift",
    shown=["mla", "mla-kv-shift"],
)
