"""Masked tokens of real text: does a bidirectional encoder gain from a shift in both directions?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_means
from kvshift_lab.analysis.panels import INTERVALS, legend_below, new_figure
from kvshift_lab.recipes.encoder import ENTRY
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.run.train_task import TaskTrainConfig
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, lower_loss
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.recipe import Recipe, Record, by_arm, curves_by_label, last_loss
from kvshift_lab.tasks import MaskedTextConfig
from kvshift_lab.variants.bidirectional import EncoderOptions
from kvshift_lab.variants.by_name import with_variant

SCORED = "masked"
VANILLA = "no shift"

LAPTOP = TaskTrainConfig(
    out=Path(),
    task=MaskedTextConfig(
        corpus="wiki2014-en/train-00.jsonl.xz",
        validation="wiki2014-en/valid.jsonl.xz",
        length=64,
        validation_rows=768,
    ),
    model=EncoderOptions(layers=2),
    optimizer=OptimizerConfig(warmup_steps=400),
    steps=4000,
    batch_size=16,
    eval_every=250,
)
PAPER = replace(
    LAPTOP,
    task=MaskedTextConfig(
        corpus="wiki2014-en/train-*.jsonl.xz",
        validation="wiki2014-en/valid.jsonl.xz",
        vocab_size=8192,
        length=512,
    ),
    model=EncoderOptions(width=512, layers=8, heads=8),
    optimizer=OptimizerConfig(warmup_steps=1000),
    steps=10_000,
    batch_size=64,
    eval_every=500,
)
SMOKE = replace(
    LAPTOP,
    task=MaskedTextConfig(vocab_size=257, length=16, validation_rows=8),
    model=EncoderOptions(width=16, layers=1, heads=2),
    optimizer=OptimizerConfig(warmup_steps=1),
    steps=4,
    batch_size=4,
    eval_every=2,
)
SIZES = {"paper": PAPER, "laptop": LAPTOP, "smoke": SMOKE}


def _models(size: EncoderOptions) -> dict[str, EncoderOptions]:
    """Return the models by their names in figures, vanilla first."""
    one_way = replace(size, shift_window=2)
    return {
        VANILLA: with_variant(size, "vanilla"),
        "shift from the previous token": replace(one_way, direction="previous"),
        "shift from the next token": replace(one_way, direction="next"),
        "shift from both": size,
    }


def arms(preset: str) -> list[TrainingJob]:
    """Return a job for each model."""
    config = SIZES[preset]
    assert isinstance(config.model, EncoderOptions)
    return [
        TrainingJob(arm=Arm(case=label), config=replace(config, model=model))
        for label, model in _models(config.model).items()
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return claims comparing each shift with none, and both directions with the better single one, paired by seed."""
    losses = {arm: [*map(last_loss, seeds.values())] for arm, seeds in by_arm(records).items()}
    vanilla, previous, following, both = losses
    pairs = [(arm, vanilla) for arm in (previous, following, both)]
    pairs += [(both, min((previous, following), key=lambda arm: statistics.fmean(losses[arm])))]
    steps = records[0].options["steps"]
    return [
        lower_loss(
            f"After {steps:,} steps, {arm}: a lower loss than with {other}",
            losses[arm],
            losses[other],
            names=(arm.label, other.label),
            note=f"nats per masked token: {statistics.fmean(losses[arm]):.4f} against "
            f"{statistics.fmean(losses[other]):.4f}, each at its best learning rate",
        )
        for arm, other in pairs
    ]


def plot(records: Sequence[Record]) -> Figure:
    """Plot the loss and the accuracy at masked tokens of the validation text by step."""
    shown = {"loss": "validation loss\n(nats per masked token)", SCORED: "accuracy at masked tokens"}
    figure, panels = new_figure(["Loss", "Accuracy"], ylabels=[*shown.values()], height=3.4)
    for axes, name in zip(panels, shown, strict=True):
        draw_means(axes, curves_by_label(records, name))
    legend_below(figure, INTERVALS)
    return figure


RECIPE = Recipe(
    entry=ENTRY,
    source="No figure of the paper: a reviewer asked for encoders",
    arms=arms,
    plot=plot,
    claims=claims,
)
