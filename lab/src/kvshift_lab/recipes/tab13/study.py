"""Table 13: losses by learning rate and context: Selective Attention."""

from __future__ import annotations

from kvshift_lab.recipes.language_models.lm_tables import table_recipe
from kvshift_lab.recipes.tab13 import ENTRY

RECIPE = table_recipe(ENTRY, ["selective-key", "kv-shift", "vanilla"], better="kv-shift")
