"""Table 6: losses by learning rate and context: vanilla."""

from kvshift_lab.recipes.language_models import table_entry

ENTRY = table_entry("tab06", "vanilla", variants=1)
