"""Table 6: losses by learning rate and context: vanilla."""

from __future__ import annotations

from kvshift_lab.recipes.language_models.lm_tables import table_recipe
from kvshift_lab.recipes.tab06 import ENTRY

RECIPE = table_recipe(ENTRY, ["vanilla"], better="vanilla")
