"""Figure 11: a shift of queries too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvshift_lab.recipes.fig11 import ENTRY
from kvshift_lab.recipes.language_models.lm_figures import MARGIN, figure_recipe
from kvshift_lab.recipes.language_models.settings import grid_point_label, grid_points_of, loss_claim, loss_pairs
from kvshift_lab.study.claims import Claim, within
from kvshift_lab.study.recipe import Record
from kvshift_lab.variants.by_name import VARIANTS


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims that also shifting queries makes no difference, at each grid point."""
    names = (VARIANTS["qkv-shift"].label, VARIANTS["kv-shift"].label)
    return [
        loss_claim(
            loss_pairs(records, "qkv-shift", "kv-shift", point),
            names,
            partial(within, margin=MARGIN),
            statement=f"{grid_point_label(point)}: {names[0]} and {names[1]} differ by less than {MARGIN}",
            paper="the loss curves are similar",
            note=f"the margin of {MARGIN} is ours",
        )
        for point in grid_points_of(records)
    ]


RECIPE = figure_recipe(ENTRY, "Figure 11", ["kv-shift", "qkv-shift", "vanilla"], claims, large="19B")
