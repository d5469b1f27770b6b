"""Figure 7b: longer shift windows."""

from __future__ import annotations

from functools import partial

from kvshift_lab.recipes.fig07b import ENTRY
from kvshift_lab.recipes.language_models.lm_figures import figure_recipe, none_better

MORE = ("kv-shift-window-3", "kv-shift-window-4")
RECIPE = figure_recipe(
    ENTRY,
    "Figure 7b",
    ["kv-shift", *MORE, "vanilla"],
    partial(none_better, MORE, "a longer shift window does not improve performance"),
)
