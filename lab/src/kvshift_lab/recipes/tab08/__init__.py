"""Table 8: losses by learning rate and context: QKV-shift."""

from kvshift_lab.recipes.language_models import table_entry

ENTRY = table_entry("tab08", "QKV-shift", variants=3)
