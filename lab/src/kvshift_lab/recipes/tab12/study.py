"""Table 12: losses by learning rate and context: Differential Transformer with QK-norm."""

from __future__ import annotations

from kvshift_lab.recipes.language_models.lm_tables import table_recipe
from kvshift_lab.recipes.tab12 import ENTRY

RECIPE = table_recipe(ENTRY, ["differential", "kv-shift", "vanilla"], better="kv-shift")
