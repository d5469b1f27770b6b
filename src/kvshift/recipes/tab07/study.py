"""Table 7: losses by learning rate and context: KV-shift."""

from __future__ import annotations

from kvshift.recipes.language_models.lm_tables import table_recipe
from kvshift.recipes.tab07 import ENTRY

RECIPE = table_recipe(ENTRY, ["kv-shift", "vanilla"], better="kv-shift")
