"""Figure 1a under other readings of details that the paper leaves open: does its comparison depend on them?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_accuracy
from kvshift_lab.analysis.learning import StepsToLevel, compare_steps, steps_to_level
from kvshift_lab.analysis.panels import legend_below, new_figure
from kvshift_lab.recipes.alternatives import ENTRY
from kvshift_lab.recipes.fig01a import study as fig01a
from kvshift_lab.recipes.induction.induction_accuracy import LAST, SCORED
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, at_most, times, within
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.models import paper_proportions
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curves, by_arm
from kvshift_lab.study.tuning import reached_soonest
from kvshift_lab.tasks import InductionConfig
from kvshift_lab.training.task_training import TaskTrainConfig, task_of

LEVEL = 0.9
FACTOR = 2.0
"""Two ratios of steps count as equal if they differ by less than this factor."""
MODELS = ((2, "vanilla"), (1, "kv-shift"))  # the longest run first


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One reading of the details that the paper leaves open.

    Attributes:
        words: name of the reading in figures and claims.
        task: fields of the task's options that differ from `OURS`.
        mlp: ratio of the MLP's width to the model's; None: 8 / 3.
    """

    words: str
    task: dict[str, Any]
    mlp: int | None = None


OURS = Reading(words="as everywhere here", task={})
READINGS = (
    OURS,
    Reading(words="loss on repeats alone", task={"loss": "repeats"}),
    Reading(words="mode latest", task={"mode": "latest"}),
    Reading(words="MLP five times as wide as the model", task={}, mlp=5),
)


def arms(preset: str) -> list[TrainingJob]:
    """Return jobs of one layer with KV shift and two without, under each reading."""
    return [
        TrainingJob(arm=_arm(model, reading), config=_config(preset, model, reading))
        for model in MODELS
        for reading in READINGS
    ]


def _config(preset: str, model: tuple[int, str], reading: Reading) -> TaskTrainConfig:
    config, width, heads = fig01a.SIZES[preset]
    assert isinstance(config.task, InductionConfig)
    options = paper_proportions(width, *model, heads=heads)
    if reading.mlp is not None:
        options = replace(options, intermediate_size=reading.mlp * width)
    return replace(config, model=options, task=replace(config.task, **reading.task))


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claim of Figure 1a under each reading, and whether its ratio is near that under `OURS`."""
    found, ours = [], _ratios(records, OURS)
    for reading in READINGS:
        reach = _steps_to_level(records, reading)
        compared = compare_steps(*reach, names=("KV-shift, 1 layer", "vanilla, 2 layers"))
        found.append(
            Claim(
                statement=f"{_reading_title(reading)}: one layer with KV shift reaches {100 * LEVEL:g} % in at most "
                "half the steps of two layers without",
                paper="much earlier; it leaves this open",
                ours=compared.text,
                direction=at_most(compared, 0.5),
                note=f"steps to {100 * LEVEL:g} %",
                own=True,
            )
        )
        if reading is not OURS:
            found.append(_ratio_claim(reading, _ratios(records, reading), ours))
    return found


def _ratio_claim(reading: Reading, theirs: list[float] | None, ours: list[float] | None) -> Claim:
    """Return the claim that a reading's ratio is near that of `OURS`; "not shown" if a run never reached the level."""
    if theirs is None or ours is None:
        said = f"no ratio: by {'this reading' if theirs is None else 'ours'} some run has not reached {100 * LEVEL:g} %"
    else:
        said = times(theirs, ours)
    return Claim(
        statement=f"{_reading_title(reading)}: the ratio of steps changes by less than a factor of {FACTOR:g}",
        paper="it leaves this open",
        ours=said,
        direction="not shown" if theirs is None or ours is None else within(theirs, ours, margin=math.log(FACTOR)),
        note="ratio of steps by this reading over that by ours",
        own=True,
    )


def plot(records: Sequence[Record]) -> Figure:
    """Plot the accuracy at the first repeat over steps, one panel for each reading."""
    models = by_arm(records)
    figure, panels = new_figure([reading.words for reading in READINGS], ylabels=["accuracy at the first repeat"])
    for axes, reading in zip(panels, READINGS, strict=True):
        runs = {_arm(model, OURS).label: models[_arm(model, reading)] for model in MODELS}
        curves = {label: accuracy_curves(seeds, SCORED) for label, seeds in runs.items()}
        (record, *_) = runs["KV-shift, 1 layer"].values()
        draw_accuracy(axes, curves, chance=task_of(record.options).chance[SCORED])
    legend_below(figure)
    return figure


def _arm(model: tuple[int, str], reading: Reading) -> Arm:
    """Return the arm of a model under a reading; under `OURS` it is the arm of Figure 1a, so the runs are shared."""
    layers, variant = model
    return Arm(variant=variant, layers=layers, case=None if reading is OURS else reading.words)


def _reading_title(reading: Reading) -> str:
    return reading.words[0].upper() + reading.words[1:]


def _steps_to_level(records: Sequence[Record], reading: Reading) -> list[StepsToLevel]:
    """Return when one layer with KV shift reached `LEVEL`, and when two layers without did."""
    models = by_arm(records)
    return [steps_to_level(accuracy_curves(models[_arm(model, reading)], SCORED), LEVEL) for model in MODELS[::-1]]


def _ratios(records: Sequence[Record], reading: Reading) -> list[float] | None:
    """Return the logarithm of each seed's ratio of steps, or None if some run has not reached the level."""
    ours, theirs = _steps_to_level(records, reading)
    if ours.missing or theirs.missing:
        return None
    return [math.log(one / other) for one, other in zip(ours.reached, theirs.reached, strict=True)]


RECIPE = Recipe(
    entry=ENTRY,
    source="What the paper leaves open of Figure 1a",
    arms=arms,
    plot=plot,
    claims=claims,
    tuned_by=reached_soonest(SCORED, LEVEL, last=LAST),
    scored=SCORED,
)
