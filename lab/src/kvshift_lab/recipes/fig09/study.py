"""Figure 9: memorizing a table of triples, where KV shift makes no difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_accuracy
from kvshift_lab.analysis.learning import StepsToLevel, compare_steps, steps_to_level
from kvshift_lab.analysis.panels import legend_below, new_figure
from kvshift_lab.recipes.fig09 import ENTRY
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.run.train_task import TaskTrainConfig, task_of
from kvshift_lab.study.arm import Arm, pair
from kvshift_lab.study.claims import Claim, Direction, percent, points, within
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.models import paper_proportions
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curves, by_arm, last_mean
from kvshift_lab.study.tuning import reached_soonest
from kvshift_lab.tasks import NGramConfig
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA

SCORED = "new"
"""Name of the accuracy at the third token of each pair of the table, tested once per pair."""
MARGIN = 0.02
"""Accuracies that differ by less count as equal; it is about four of the 180 pairs."""
LEVEL = 0.99
"""Accuracy that defines how soon a model learns: the step at which it is reached."""
LAST = 20
"""Number of final evaluations whose mean is the memorized share: a single one may be a spike."""
RATIO_MARGIN = 1.25
"""Numbers of steps to the level that differ by less than this factor count as equal."""

PAPER = TaskTrainConfig(
    out=Path(),
    task=NGramConfig(),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=1000, clip_norm=0.0),
    steps=5000,
    batch_size=512,
    eval_every=100,
    eval_rows=None,  # the whole table
    save_every=5000,
)
LAPTOP = replace(
    PAPER,
    optimizer=OptimizerConfig(warmup_steps=20, clip_norm=0.0),
    steps=800,
    batch_size=128,
    eval_every=5,
    stop_at=1.0,
    stop_after=LAST,
)
SMOKE = replace(
    LAPTOP, optimizer=OptimizerConfig(warmup_steps=1), task=NGramConfig(pairs=5), steps=4, batch_size=8, eval_every=2
)

# By preset: config, and for each size of the paper its layers, width, heads and learning rate, the longest run first.
_SMALL = {"0.4M": (2, 128, 1, 5e-4), "0.8K": (1, 8, 1, 1e-2)}
SIZES = {
    "paper": (PAPER, {"50M": (4, 1024, 8, 2e-4), "0.4M": (2, 128, 1, 2e-4), "0.8K": (1, 8, 1, 1e-2)}),
    "laptop": (LAPTOP, {"3.2M": (4, 256, 2, 3e-4), **_SMALL}),
    "smoke": (SMOKE, {"0.8K": _SMALL["0.8K"]}),
}


def arms(preset: str) -> list[TrainingJob]:
    """Return a job for each size, with and without KV shift."""
    config, sizes = SIZES[preset]
    return [
        TrainingJob(
            arm=Arm(variant=variant, case=size),
            config=replace(
                config,
                model=paper_proportions(width, layers, variant, heads=heads),
                optimizer=replace(config.optimizer, learning_rate=rate),
            ),
        )
        for size, (layers, width, heads, rate) in sizes.items()
        for variant in SHIFTED_AND_VANILLA
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims that KV shift makes no difference at any size, in how much is memorized and how soon."""
    models = by_arm(records)
    found = []
    for size in _sizes(records):
        both = [models[arm] for arm in pair(case=size)]
        shifted, vanilla = map(_final, both)
        soon, late = (steps_to_level(accuracy_curves(seeds, SCORED), LEVEL) for seeds in both)
        perfect = all(share == 1 for share in (*shifted, *vanilla))
        found += [
            Claim(
                statement=f"At {size} parameters KV shift changes how much is memorized by less than "
                f"{100 * MARGIN:g} points",
                paper="no difference",
                ours=f"both memorize all, in each of {len(shifted)} seeds"
                if perfect
                else f"{percent(shifted)} against {percent(vanilla)}: {points(shifted, vanilla)}",
                direction=within(shifted, vanilla, margin=MARGIN),
                note=f"the mean of the last {LAST} evaluations; the paper has curves without legible axes",
            ),
            Claim(
                statement=f"At {size} parameters KV shift needs {1 / RATIO_MARGIN:g} to {RATIO_MARGIN:g} times as many "
                "steps",
                paper="no difference",
                ours=compare_steps(soon, late).text,
                direction=_as_soon(soon, late),
                note=f"steps to {100 * LEVEL:g} %; the paper has curves without legible axes",
            ),
        ]
    return found


def plot(records: Sequence[Record]) -> Figure:
    """Plot the accuracy over the table by step, one panel for each size."""
    models, sizes = by_arm(records), _sizes(records)
    chance = task_of(records[0].options).chance[SCORED]
    titles = [f"{size} parameters" for size in sizes]
    figure, panels = new_figure(titles, ylabels=["accuracy over the table"], sharey=True)
    for axes, size in zip(panels, sizes, strict=True):
        curves = {replace(arm, case=None).label: accuracy_curves(models[arm], SCORED) for arm in pair(case=size)}
        draw_accuracy(axes, curves, chance=chance)
    legend_below(figure)
    return figure


def _sizes(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.arm.case or "" for record in records))


def _final(seeds: dict[int, Record]) -> list[float]:
    return [last_mean(record, SCORED, LAST) for record in seeds.values()]


def _as_soon(shifted: StepsToLevel, vanilla: StepsToLevel) -> Direction:
    """Decide from the interval of the ratio of steps; "not shown" if a run never reaches the level."""
    if shifted.missing or vanilla.missing:
        return "not shown"
    logs = [[math.log(step) for step in reach.reached] for reach in (shifted, vanilla)]
    return within(*logs, margin=math.log(RATIO_MARGIN))


RECIPE = Recipe(
    entry=ENTRY,
    source="Figure 9",
    arms=arms,
    plot=plot,
    claims=claims,
    tuned_by=reached_soonest(SCORED, LEVEL, last=LAST),
    scored=SCORED,
)
