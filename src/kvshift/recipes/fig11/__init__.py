"""Figure 11: queries too."""

from kvshift.recipes.language_models import figure_entry

ENTRY = figure_entry("fig11", "queries too", runs=3, size="19B")
