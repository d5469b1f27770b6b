"""Code shared by Figures 1a and 1b: accuracy curves on induction, steps to an accuracy, and chance level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_accuracy
from kvshift_lab.analysis.learning import StepsToLevel, steps_to_level
from kvshift_lab.analysis.panels import legend_below, new_figure
from kvshift_lab.run.train_task import task_of
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.recipe import Record, accuracy_curves, by_arm, curves_by_label, last_mean

SCORED = "first_repeat"
"""Name of the paper's metric: accuracy at the target of the first repeat of each sequence."""
LAST = 3
"""Number of evaluations whose mean is the final accuracy; a run ends early after as many at `stop_at`."""


def steps_to_level_by_arm(records: Sequence[Record], level: float) -> dict[Arm, StepsToLevel]:
    """Return when each model reached an accuracy of `level` at the first repeat."""
    return {arm: steps_to_level(accuracy_curves(seeds, SCORED), level) for arm, seeds in by_arm(records).items()}


def final_accuracy(seeds: Mapping[int, Record]) -> list[float]:
    """Return the accuracy of each seed at the end of training."""
    return [last_mean(record, SCORED, LAST) for record in seeds.values()]


def plot_induction(records: Sequence[Record], title: str) -> Figure:
    """Plot the accuracy at the first repeat over steps."""
    figure, (axes,) = new_figure([title], ylabels=["accuracy at the first repeat"], height=4)
    draw_accuracy(axes, curves_by_label(records, SCORED), chance=chance(records))
    legend_below(figure)
    return figure


def chance(records: Sequence[Record]) -> float:
    """Return the accuracy of guessing among the tokens that have occurred, without using their order."""
    return task_of(records[0].options).chance[SCORED]
