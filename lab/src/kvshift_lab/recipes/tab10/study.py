"""Table 10: losses by learning rate and context: V-shift."""

from __future__ import annotations

from kvshift_lab.recipes.language_models.lm_tables import table_recipe
from kvshift_lab.recipes.tab10 import ENTRY

RECIPE = table_recipe(ENTRY, ["v-shift", "kv-shift", "vanilla"], better="kv-shift")
