"""Figure 7a: a shift of keys alone, and of values alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvshift_lab.recipes.fig07a import ENTRY
from kvshift_lab.recipes.language_models.lm_figures import figure_recipe
from kvshift_lab.recipes.language_models.settings import lower_loss_claims
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.recipe import Record


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims that both shifts beat one alone, and one alone beats none, at each grid point and pooled."""
    pairs = (("kv-shift", "k-shift"), ("kv-shift", "v-shift"), ("k-shift", "vanilla"), ("v-shift", "vanilla"))
    return lower_loss_claims(records, pairs, lambda *_: "both play an important role")


RECIPE = figure_recipe(ENTRY, "Figure 7a", ["kv-shift", "k-shift", "v-shift", "vanilla"], claims)
