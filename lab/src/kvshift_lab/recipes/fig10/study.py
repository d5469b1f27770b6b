"""Figure 10: gated and bounded coefficients."""

from __future__ import annotations

from functools import partial

from kvshift_lab.recipes.fig10 import ENTRY
from kvshift_lab.recipes.language_models.lm_figures import figure_recipe, none_better

MORE = ("kv-shift-gate", "kv-shift-clamp")
RECIPE = figure_recipe(
    ENTRY,
    "Figure 10",
    ["kv-shift", *MORE, "vanilla"],
    partial(none_better, MORE, "more controls do not make the model learn better"),
)
