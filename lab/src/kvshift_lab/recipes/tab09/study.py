"""Table 9: losses by learning rate and context: K-shift."""

from __future__ import annotations

from kvshift_lab.recipes.language_models.lm_tables import table_recipe
from kvshift_lab.recipes.tab09 import ENTRY

RECIPE = table_recipe(ENTRY, ["k-shift", "kv-shift", "vanilla"], better="kv-shift")
