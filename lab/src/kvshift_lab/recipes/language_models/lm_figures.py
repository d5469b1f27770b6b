"""Figures 7, 10 and 11: which parts of KV shift matter, and whether more of it helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import curve_difference, draw_means
from kvshift_lab.analysis.panels import INTERVALS, legend_below, new_figure
from kvshift_lab.core.statistics import difference_interval
from kvshift_lab.recipes.language_models.settings import (
    LARGE,
    NOTES,
    TABLES,
    arm_at,
    arms_of,
    grid_point_label,
    grid_points_of,
    loss_claim,
    loss_pairs,
)
from kvshift_lab.study.claims import Claim, Direction
from kvshift_lab.study.entry import Entry
from kvshift_lab.study.jobs import StudyJob
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curves, by_arm
from kvshift_lab.variants.by_name import VARIANTS

MARGIN = 0.01
"""Losses that differ by fewer nats per token than this count as equal. The paper's effects are 0.01 to 0.03."""


def _arms(methods: Sequence[str], large: str, preset: str) -> list[StudyJob]:
    """Return the figure's jobs: on laptop only at length 128, at each depth; on paper with the figure's model size."""
    setting = TABLES[preset] if preset != "paper" else LARGE[large]
    if preset == "laptop":
        setting = replace(setting, points=[point for point in setting.points if point.length == 128])
    return arms_of(setting, methods)


def _by_less_than_margin(ours: Sequence[float], theirs: Sequence[float]) -> Direction:
    """Decide from the interval of paired differences whether `ours` are lower by less than `MARGIN`, or higher."""
    interval = difference_interval([other - one for one, other in zip(ours, theirs, strict=True)])
    if interval is None:
        return "not shown"
    return "holds" if interval[1] < MARGIN else "fails" if interval[0] > MARGIN else "not shown"


def none_better(keys: Sequence[str], words: str, records: Sequence[Record]) -> list[Claim]:
    """Return the claims that no method's loss is lower than KV shift's by `MARGIN` or more, at each grid point.

    Args:
        keys: names of the methods.
        words: the paper's own claim.
        records: records of the preset.
    """
    ours = VARIANTS["kv-shift"].label
    return [
        loss_claim(
            loss_pairs(records, key, "kv-shift", point),
            (VARIANTS[key].label, ours),
            _by_less_than_margin,
            statement=f"{grid_point_label(point)}: {VARIANTS[key].label} is not lower than {ours} by {MARGIN} or more",
            paper=words,
            note=f"the margin of {MARGIN} is ours",
        )
        for key in keys
        for point in grid_points_of(records)
    ]


def plot_differences(methods: Sequence[str], records: Sequence[Record]) -> Figure:
    """Plot each method's loss minus vanilla's over steps, one panel per grid point: mean over seeds and interval."""
    points, models = grid_points_of(records), by_arm(records)
    titles = [grid_point_label(point) for point in points]
    figure, panels = new_figure(titles, ylabels=["loss minus vanilla's\n(nats per token)"], height=3.6, sharey=True)
    for axes, point in zip(panels, points, strict=True):
        losses = {key: accuracy_curves(models[arm_at(point, key)], "loss") for key in methods}
        vanilla = losses.pop("vanilla")
        draw_means(axes, {VARIANTS[key].label: curve_difference(curves, vanilla) for key, curves in losses.items()})
        axes.axhline(0, color="black", linewidth=0.8)
    legend_below(figure, INTERVALS)
    return figure


def figure_recipe(
    entry: Entry,
    source: str,
    methods: Sequence[str],
    claims: Callable[[Sequence[Record]], list[Claim]],
    *,
    large: str = "1.5B",
) -> Recipe:
    """Return the recipe of a figure that shows the losses of some methods minus vanilla's.

    Args:
        entry: catalogue entry of the recipe.
        source: number of the figure in the paper.
        methods: all variants that are trained.
        claims: see `Recipe`.
        large: size of the paper's model.
    """
    return Recipe(
        entry=entry,
        source=source,
        arms=partial(_arms, methods, large),
        plot=partial(plot_differences, methods),
        claims=claims,
        notes=NOTES[2:3],
    )
