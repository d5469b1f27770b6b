"""Figure 5: losses by model size."""

from __future__ import annotations

from kvshift_lab.recipes.fig05 import ENTRY
from kvshift_lab.recipes.scaling.power_law import over_sizes, plot_curves, scaling_recipe

RECIPE = scaling_recipe(ENTRY, "Figure 5", over_sizes, plot_curves, longer=False)
