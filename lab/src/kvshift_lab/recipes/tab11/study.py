"""Table 11: losses by learning rate and context: Differential Transformer."""

from __future__ import annotations

from kvshift_lab.recipes.language_models.lm_tables import table_recipe
from kvshift_lab.recipes.tab11 import ENTRY

RECIPE = table_recipe(ENTRY, ["differential-no-qk-norm", "kv-shift", "vanilla"], better="kv-shift")
