"""Figure 10: gated and bounded coefficients."""

from kvshift_lab.recipes.language_models import figure_entry

ENTRY = figure_entry("fig10", "gates and bounds", runs=4, size="1.5B")
