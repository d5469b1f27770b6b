"""A recipe to copy: vanilla and KV shift on a task, compared over seeds, each at its best learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_means
from kvshift_lab.analysis.panels import INTERVALS, legend_below, new_figure
from kvshift_lab.recipes.my_recipe import ENTRY
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.run.train_task import TaskTrainConfig
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, lower_loss
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.recipe import Recipe, Record, by_arm, curves_by_label, last_loss
from kvshift_lab.tasks import MQARConfig
from kvshift_lab.variants.by_name import with_variant
from kvshift_lab.variants.model_config import ModelConfig

VARIANTS = ("vanilla", "kv-shift")  # names of `variants/by_name.py`
LAPTOP = TaskTrainConfig(
    task=MQARConfig(length=32, pairs=4, vocab_size=64),
    model=ModelConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
    optimizer=OptimizerConfig(warmup_steps=50),
    steps=1000,
    batch_size=32,
    eval_every=100,
)
SMOKE = replace(LAPTOP, optimizer=OptimizerConfig(warmup_steps=1), steps=4, batch_size=4, eval_every=2, eval_rows=8)
SIZES = {"laptop": LAPTOP, "smoke": SMOKE}
SCORED = "queries"  # one of the task's slices, whose accuracy the figure shows


def arms(preset: str) -> list[TrainingJob]:
    """Return a job for each model; each is run with every seed of the preset."""
    config = SIZES[preset]
    return [
        TrainingJob(arm=Arm(variant=variant), config=replace(config, model=with_variant(config.model, variant)))
        for variant in VARIANTS
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claim that KV shift has a lower loss at the end, paired by seed."""
    seeds = by_arm(records)
    vanilla, shifted = ([*map(last_loss, seeds[Arm(variant=variant)].values())] for variant in VARIANTS)
    note = f"nats per answer: {statistics.fmean(shifted):.4f} against {statistics.fmean(vanilla):.4f}"
    return [lower_loss("At the end, KV shift has a lower loss", shifted, vanilla, note=note)]


def plot(records: Sequence[Record]) -> Figure:
    """Plot loss and accuracy by step, with intervals over seeds."""
    shown = {"loss": "validation loss (nats per answer)", SCORED: "accuracy"}
    figure, panels = new_figure(["Loss", "Accuracy"], ylabels=[*shown.values()], height=3.4)
    for axes, name in zip(panels, shown, strict=True):
        draw_means(axes, curves_by_label(records, name))
    legend_below(figure, INTERVALS)
    return figure


RECIPE = Recipe(entry=ENTRY, source="No figure of the paper", arms=arms, plot=plot, claims=claims)
