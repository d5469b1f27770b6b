"""Table 7: losses by learning rate and context: KV-shift."""

from __future__ import annotations

from kvshift_lab.recipes.language_models.lm_tables import table_recipe
from kvshift_lab.recipes.tab07 import ENTRY

RECIPE = table_recipe(ENTRY, ["kv-shift", "vanilla"], better="kv-shift")
