"""Table 13: losses by learning rate and context: Selective Attention."""

from kvshift_lab.recipes.language_models import table_entry

ENTRY = table_entry("tab13", "Selective Attention", variants=3)
