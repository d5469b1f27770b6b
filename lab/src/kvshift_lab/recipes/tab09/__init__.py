"""Table 9: losses by learning rate and context: K-shift."""

from kvshift_lab.recipes.language_models import table_entry

ENTRY = table_entry("tab09", "K-shift", variants=3)
