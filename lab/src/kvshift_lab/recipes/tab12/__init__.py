"""Table 12: losses by learning rate and context: Differential Transformer with QK-norm."""

from kvshift_lab.recipes.language_models import table_entry

ENTRY = table_entry("tab12", "Differential Transformer with QK-norm", variants=3)
