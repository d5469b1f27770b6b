"""MQAR, multi-query associative recall: a task of the paper's related work, in the setting of Zoology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_accuracy
from kvshift_lab.analysis.learning import compare_steps, steps_to_level
from kvshift_lab.analysis.panels import legend_below, new_figure
from kvshift_lab.recipes.mqar import ENTRY
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.run.train_task import TaskTrainConfig
from kvshift_lab.study.arm import Arm, pair
from kvshift_lab.study.claims import Claim, higher, lower, percent, sooner
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curves, by_arm, last_mean
from kvshift_lab.study.tuning import reached_soonest
from kvshift_lab.tasks import MQARConfig
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA, with_variant
from kvshift_lab.variants.small_gpt2 import GPT2Options

SCORED = "queries"
LEVEL = 0.99
LAST = 3
"""Number of evaluations whose mean is the final accuracy; a run ends early after as many at 99.9 %."""
MODELS = ((2, "vanilla"), (2, "kv-shift"), (1, "vanilla"), (1, "kv-shift"))  # the longest run first

PAPER = TaskTrainConfig(
    out=Path(),
    task=MQARConfig(),
    optimizer=OptimizerConfig(schedule="cosine", warmup_steps=0, beta2=0.999, clip_norm=0.0),
    steps=64 * 196,  # 64 times 100,000 sequences
    batch_size=512,
    eval_every=196,
    eval_rows=3000,
    eval_batch_size=250,
    save_every=1960,
    data_workers=1,
    progress=False,
    bf16="no",
)
LONG = replace(PAPER, task=MQARConfig(length=256, pairs=16), steps=64 * 391, batch_size=256, eval_every=391)
LAPTOP = replace(
    PAPER,
    task=MQARConfig(length=32, pairs=4, vocab_size=128),
    optimizer=replace(PAPER.optimizer, warmup_steps=50),
    steps=10_000,  # two layers without shift need up to 4,000 at a suitable learning rate
    batch_size=64,
    eval_every=50,
    eval_rows=500,
    save_every=1000,
    data_workers=0,
    stop_at=0.999,
)
SMOKE = replace(
    LAPTOP, task=MQARConfig(length=16, pairs=2, vocab_size=32), steps=4, batch_size=8, eval_every=2, eval_rows=9
)

# By preset: configs, the longest sequences first, and widths.
SIZES = {
    "paper": ((LONG, replace(PAPER, task=MQARConfig(length=128, pairs=8)), PAPER), (512, 256, 128, 64)),
    "laptop": ((LAPTOP,), (64,)),
    "smoke": ((SMOKE,), (8,)),
}


def arms(preset: str) -> list[TrainingJob]:
    """Return a job for each model at each length and width."""
    configs, widths = SIZES[preset]
    return [
        TrainingJob(
            arm=Arm(variant=variant, layers=layers, length=config.task.length, width=width),
            config=replace(
                config,
                model=with_variant(
                    GPT2Options(width=width, layers=layers, heads=1, mlp=False, head="tied", embedding_rows=None),
                    variant,
                ),
            ),
        )
        for config in configs
        for width in widths
        for layers, variant in MODELS
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims that two layers answer every query, one only with KV shift, and two learn sooner with it."""
    models, found = by_arm(records), []
    for where in _cells(records):
        for model in MODELS[:3:2] + MODELS[1::2]:
            layers, variant = model
            name = Arm(variant=variant, layers=layers).label
            runs = models[replace(where, variant=variant, layers=layers)]
            accuracies = [last_mean(record, SCORED, LAST) for record in runs.values()]
            steps = max(record.options["steps"] for record in runs.values())
            answers = model != (1, "vanilla")
            right = sum((accuracy >= LEVEL) == answers for accuracy in accuracies)
            found.append(
                Claim(
                    statement=f"{where}: {name}, {'answers' if answers else 'does not'} within {steps:,} steps",
                    paper="100 % in Zoology's Figure 2" if model == (2, "vanilla") else "no number in the paper",
                    ours=percent(accuracies),
                    direction=(higher if answers else lower)(accuracies, [LEVEL] * len(accuracies)),
                    note=f"answers means {100 * LEVEL:g} %, here in {right if answers else len(runs) - right} of "
                    f"{len(runs)} seeds, at the best learning rate",
                    own=True,
                )
            )
        names = [arm.label for arm in pair(layers=2)]
        reach = [
            steps_to_level(accuracy_curves(models[replace(where, variant=variant, layers=2)], SCORED), LEVEL)
            for variant in SHIFTED_AND_VANILLA
        ]
        compared = compare_steps(*reach, names=(names[0], names[1]))
        found.append(
            Claim(
                statement=f"{where}: of two layers, those with KV shift learn sooner",
                paper="no number in the paper",
                ours=compared.text,
                direction=sooner(compared),
                note=f"steps to {100 * LEVEL:g} %, each at its best learning rate",
                own=True,
            )
        )
    return found


def plot(records: Sequence[Record]) -> Figure:
    """Plot the accuracy over steps at the best learning rate, one panel for each length and width."""
    models, cells = by_arm(records), _cells(records)
    pairs = {record.options["task"]["length"]: record.options["task"]["pairs"] for record in records}
    figure, panels = new_figure(
        [f"{cell.length} tokens, {pairs[cell.length]} pairs, width {cell.width}" for cell in cells],
        ylabels=["accuracy at queries"],
        columns=min(3, len({cell.width for cell in cells})),
        height=3.6,
    )
    for axes, cell in zip(panels, cells, strict=True):
        curves = {
            Arm(variant=variant, layers=layers).label: accuracy_curves(
                models[replace(cell, variant=variant, layers=layers)], SCORED
            )
            for layers, variant in MODELS
        }
        draw_accuracy(axes, curves, chance=1 / pairs[cell.length])
    legend_below(figure)
    return figure


def _cells(records: Sequence[Record]) -> list[Arm]:
    """Return all combinations of length and width, as arms without variant and depth."""
    cells = {replace(record.arm, variant=None, layers=None) for record in records}
    return sorted(cells, key=lambda cell: (cell.length, cell.width))


RECIPE = Recipe(
    entry=ENTRY,
    source="Figure 2 of Arora et al., Zoology (2023); the paper names the task beside induction",
    arms=arms,
    plot=plot,
    claims=claims,
    tuned_by=reached_soonest(SCORED, LEVEL, last=LAST),
    scored=SCORED,
)
