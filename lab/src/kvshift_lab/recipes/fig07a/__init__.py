"""Figure 7a: a shift of keys alone, and of values alone."""

from kvshift_lab.recipes.language_models import figure_entry

ENTRY = figure_entry("fig07a", "keys alone, values alone", runs=4, size="1.5B")
