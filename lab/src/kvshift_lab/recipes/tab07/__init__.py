"""Table 7: losses by learning rate and context: KV-shift."""

from kvshift_lab.recipes.language_models import table_entry

ENTRY = table_entry("tab07", "KV-shift", variants=2)
