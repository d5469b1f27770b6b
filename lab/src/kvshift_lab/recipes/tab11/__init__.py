"""Table 11: losses by learning rate and context: Differential Transformer."""

from kvshift_lab.recipes.language_models import table_entry

ENTRY = table_entry("tab11", "Differential Transformer", variants=3)
