"""Figures 7, 10 and 11: which parts of KV shift matter, and whether more of it helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvshift.lab.analysis.accuracy import draw_means, minus
from kvshift.lab.analysis.panels import INTERVALS, legend_below, new_figure
from kvshift.lab.core.statistics import difference_interval
from kvshift.lab.study.claims import Claim, Direction, within
from kvshift.lab.study.jobs import StudyJob
from kvshift.lab.study.recipe import Recipe, Record, accuracy_curves, by_label
from kvshift.lab.study.tuning import least_loss
from kvshift.lab.variants.by_name import VARIANTS
from kvshift.recipes.catalogue import CATALOGUE
from kvshift.recipes.language_models.lm_tables import NOTES
from kvshift.recipes.language_models.settings import (
    LARGE,
    TABLES,
    Place,
    claim_of,
    compared,
    jobs_of,
    label_at,
    pairs_of,
    place_label,
    places_of,
    pooled,
)

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.figure import Figure

MARGIN = 0.01
"""Nats per token: losses that differ by less count as alike. The effects of the paper are 0.01 to 0.03."""


def _jobs(methods: Sequence[str], large: str, preset: str, seeds: Sequence[int]) -> list[StudyJob]:
    """At the middle one of the tables' lengths, at each depth; on a GPU in the size of the paper's figure."""
    setting = TABLES[preset] if preset != "paper" else LARGE[large]
    if preset == "laptop":
        setting = replace(setting, places=[place for place in setting.places if place.length == 128])
    return jobs_of(setting, methods, seeds)


def no_better(records: Sequence[Record], more: str, place: Place, *, paper: str) -> Claim:
    """Whether a method is lower than KV shift by less than `MARGIN`, if at all: by the interval of the differences."""
    names = (VARIANTS[more].label, VARIANTS["kv-shift"].label)
    return claim_of(
        pairs_of(records, more, "kv-shift", place),
        names,
        _by_less_than_margin,
        statement=f"{place_label(place)}: {names[0]} is not lower than {names[1]} by {MARGIN} or more",
        paper=paper,
        size=f"the margin of {MARGIN} is ours",
    )


def _by_less_than_margin(ours: Sequence[float], theirs: Sequence[float]) -> Direction:
    """Whether ours are lower by less than `MARGIN`, or higher."""
    interval = difference_interval([other - one for one, other in zip(ours, theirs, strict=True)])
    if interval is None:
        return "not shown"
    return "holds" if interval[1] < MARGIN else "fails" if interval[0] > MARGIN else "not shown"


def _ablation(records: Sequence[Record]) -> list[Claim]:
    words = "both play an important role"
    pairs = (("kv-shift", "k-shift"), ("kv-shift", "v-shift"), ("k-shift", "vanilla"), ("v-shift", "vanilla"))
    return [
        claim
        for better, worse in pairs
        for claim in (
            *(compared(records, better, worse, place, paper=words) for place in places_of(records)),
            *pooled(records, better, worse),
        )
    ]


def _more(keys: Sequence[str], words: str, records: Sequence[Record]) -> list[Claim]:
    return [no_better(records, key, place, paper=words) for key in keys for place in places_of(records)]


def _similar(records: Sequence[Record]) -> list[Claim]:
    names = (VARIANTS["qkv-shift"].label, VARIANTS["kv-shift"].label)
    return [
        claim_of(
            pairs_of(records, "qkv-shift", "kv-shift", place),
            names,
            partial(within, margin=MARGIN),
            statement=f"{place_label(place)}: {names[0]} and {names[1]} differ by less than {MARGIN}",
            paper="the loss curves are similar",
            size=f"the margin of {MARGIN} is ours",
        )
        for place in places_of(records)
    ]


def plot_differences(methods: Sequence[str], records: Sequence[Record]) -> Figure:
    """At each place, the loss of each method minus vanilla's over the steps: the mean over seeds, and its interval."""
    places, models = places_of(records), by_label(records)
    titles = [place_label(place) for place in places]
    figure, panels = new_figure(titles, ylabels=["loss minus vanilla's\n(nats per token)"], height=3.6, sharey=True)
    for axes, place in zip(panels, places, strict=True):
        losses = {key: accuracy_curves(models[label_at(place, key)], "loss") for key in methods}
        vanilla = losses.pop("vanilla")
        draw_means(axes, {VARIANTS[key].label: minus(curves, vanilla) for key, curves in losses.items()})
        axes.axhline(0, color="black", linewidth=0.8)
    legend_below(figure, INTERVALS)
    return figure


def _recipe(
    name: str,
    source: str,
    methods: Sequence[str],
    claims: Callable[[Sequence[Record]], list[Claim]],
    *,
    large: str = "1.5B",
) -> Recipe:
    return Recipe(
        entry=CATALOGUE[name],
        source=source,
        jobs=partial(_jobs, methods, large),
        plot=partial(plot_differences, methods),
        claims=claims,
        tuned_by=least_loss(),
        notes=(
            f"The paper trained its {large} model (Table 16) and shows training losses without numbers; its text is "
            "private, and FineWeb-Edu stands for it. The laptop draws on the runs of Tables 6 to 10.",
            *NOTES[2:3],
        ),
    )


_LONGER = "a longer shift window does not improve performance"
_CONTROLS = "more controls do not make the model learn better"

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("fig07a", "Figure 7a", ["kv-shift", "k-shift", "v-shift", "vanilla"], _ablation),
        _recipe(
            "fig07b",
            "Figure 7b",
            ["kv-shift", "kv-shift-window-3", "kv-shift-window-4", "vanilla"],
            partial(_more, ["kv-shift-window-3", "kv-shift-window-4"], _LONGER),
        ),
        _recipe(
            "fig10",
            "Figure 10",
            ["kv-shift", "kv-shift-gate", "kv-shift-clamp", "vanilla"],
            partial(_more, ["kv-shift-gate", "kv-shift-clamp"], _CONTROLS),
        ),
        _recipe("fig11", "Figure 11", ["kv-shift", "qkv-shift", "vanilla"], _similar, large="19B"),
    )
}
