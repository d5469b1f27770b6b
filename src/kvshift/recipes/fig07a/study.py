"""Figure 7a: a shift of keys alone, and of values alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvshift.lab.study.claims import Claim
from kvshift.lab.study.recipe import Record
from kvshift.recipes.fig07a import ENTRY
from kvshift.recipes.language_models.lm_figures import figure_recipe
from kvshift.recipes.language_models.settings import grid_points_of, lower_loss_claim, pooled_claims


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims that both shifts beat one alone, and one alone beats none, at each grid point and pooled."""
    words = "both play an important role"
    pairs = (("kv-shift", "k-shift"), ("kv-shift", "v-shift"), ("k-shift", "vanilla"), ("v-shift", "vanilla"))
    return [
        claim
        for better, worse in pairs
        for claim in (
            *(lower_loss_claim(records, better, worse, point, paper=words) for point in grid_points_of(records)),
            *pooled_claims(records, better, worse),
        )
    ]


RECIPE = figure_recipe(ENTRY, "Figure 7a", ["kv-shift", "k-shift", "v-shift", "vanilla"], claims)
