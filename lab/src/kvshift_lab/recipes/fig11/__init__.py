"""Figure 11: a shift of queries too."""

from kvshift_lab.recipes.language_models import figure_entry

ENTRY = figure_entry("fig11", "queries too", runs=3, size="19B")
