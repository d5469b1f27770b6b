"""Figure 7b: longer shift windows."""

from kvshift_lab.recipes.language_models import figure_entry

ENTRY = figure_entry("fig07b", "longer windows", runs=4, size="1.5B")
