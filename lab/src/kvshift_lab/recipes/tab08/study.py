"""Table 8: losses by learning rate and context: QKV-shift."""

from __future__ import annotations

from kvshift_lab.recipes.language_models.lm_tables import table_recipe
from kvshift_lab.recipes.tab08 import ENTRY

RECIPE = table_recipe(ENTRY, ["qkv-shift", "kv-shift", "vanilla"], better="kv-shift")
