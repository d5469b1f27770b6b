"""Table 10: losses by learning rate and context: V-shift."""

from kvshift_lab.recipes.language_models import table_entry

ENTRY = table_entry("tab10", "V-shift", variants=3)
