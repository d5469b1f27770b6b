"""Figure 6: the power law of loss by size, and training on three times the tokens."""

from __future__ import annotations

from kvshift_lab.recipes.fig06 import ENTRY
from kvshift_lab.recipes.scaling.power_law import plot_scaling, scaling, scaling_recipe

RECIPE = scaling_recipe(ENTRY, "Figure 6", scaling, plot_scaling, longer=True)
