"""The rebuttal's control: KV shift does not improve how well a model generates sentences of a context-free grammar."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_chance, draw_means, draw_shares
from kvshift_lab.analysis.panels import INTERVALS, LOSS, legend_below, new_figure
from kvshift_lab.core.statistics import t_interval
from kvshift_lab.recipes.cfg import ENTRY
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.run.train_task import TaskTrainConfig, evaluation_of, task_of
from kvshift_lab.study.arm import Arm, pair
from kvshift_lab.study.claims import Claim, higher, percent, points, question, verdict, within
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.models import paper_proportions
from kvshift_lab.study.recipe import Recipe, Record, by_arm, curves_by_label
from kvshift_lab.tasks import CFG3S, CFGConfig, CFGTask
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA

MEASURES = {"from_start": "unprompted samples", "from_prefix": "continued sentences"}
SHARE_MARGIN = 0.05
"""Shares of grammatical sentences that differ by less count as equal."""
LOSS_MARGIN = 0.01
"""Losses that differ by fewer nats per token than this count as equal."""
NEAR = 0.05
"""A final loss counts as near the least possible if it exceeds it by fewer nats per token than this."""

PAPER = TaskTrainConfig(
    out=Path(),
    task=CFGConfig(),  # cfg3f, windows of 512
    optimizer=OptimizerConfig(
        learning_rate=3e-4, schedule="wsd", warmup_steps=1000, decay_fraction=0.99, beta2=0.98, weight_decay=0.1
    ),
    steps=100_000,
    batch_size=96,
    eval_every=2000,
    eval_rows=960,
    save_every=5000,
    data_workers=1,
    questions=4000,
)
LAPTOP = replace(
    PAPER,
    task=CFGConfig(grammar=CFG3S, length=48, prefix=8),
    optimizer=replace(PAPER.optimizer, learning_rate=6e-3, warmup_steps=100, decay_fraction=0.95),
    steps=2400,
    batch_size=32,
    eval_every=200,
    eval_rows=512,
    eval_batch_size=256,
    save_every=1000,
    data_workers=0,
)
LONG = replace(LAPTOP, steps=24_000, eval_every=1000, save_every=2000)
SMOKE = replace(
    LAPTOP,
    optimizer=replace(PAPER.optimizer, warmup_steps=1, decay_fraction=0.75),
    steps=4,
    batch_size=4,
    eval_every=2,
    eval_rows=8,
    eval_batch_size=8,
    questions=8,
)

# By preset: config, width, layers and heads.
SIZES = {
    "paper": (PAPER, 768, 12, 12),
    "long": (LONG, 64, 4, 4),
    "laptop": (LAPTOP, 64, 4, 4),
    "smoke": (SMOKE, 16, 1, 2),
}


def arms(preset: str) -> list[TrainingJob]:
    """Return a job for both models."""
    config, width, layers, heads = SIZES[preset]
    return [
        TrainingJob(
            arm=Arm(variant=variant),
            config=replace(config, model=paper_proportions(width, layers, variant, heads=heads)),
        )
        for variant in SHIFTED_AND_VANILLA
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims that three measures of performance are equal, and whether losses are near the least possible.

    Long runs compare final performance; runs shorter than `LONG` compare how soon a model learns.
    """
    ours, theirs = (by_arm(records)[arm] for arm in pair())
    steps = records[0].options["steps"]
    after = f"After {steps:,} steps"
    words_of_paper = "does not improve; final performance almost the same"
    if steps < LONG.steps:
        after = f"How soon: after {steps:,} steps"
        words_of_paper = "does not improve; convergence speed almost the same"
    found = []
    for measure, words in MEASURES.items():
        shifted, vanilla = (
            [record.result["answers"][measure]["share"] for record in seeds.values()] for seeds in (ours, theirs)
        )
        found.append(
            Claim(
                statement=f"{after}, KV shift changes the share of {words} that are grammatical by less than "
                f"{100 * SHARE_MARGIN:g} points",
                paper=words_of_paper,
                ours=f"{percent(shifted)} against {percent(vanilla)}: {points(shifted, vanilla)}",
                direction=within(shifted, vanilla, margin=SHARE_MARGIN),
                note="the paper gives no number",
            )
        )
    shifted, vanilla = ([record.result["evaluation"]["loss"] for record in seeds.values()] for seeds in (ours, theirs))
    floor = _floor(records)
    found.append(
        Claim(
            statement=f"{after}, KV shift changes the validation loss by less than {LOSS_MARGIN:g} nats per token",
            paper=words_of_paper,
            ours=verdict([one - other for one, other in zip(shifted, vanilla, strict=True)]).text,
            direction=within(shifted, vanilla, margin=LOSS_MARGIN),
            note=f"with shift {statistics.fmean(shifted):.3f}, "
            f"without {statistics.fmean(vanilla):.3f}, least possible {floor:.3f}; the paper gives no number",
        )
    )
    return [
        *found,
        *(_near(after, arm.label, losses, floor) for arm, losses in zip(pair(), (shifted, vanilla), strict=True)),
    ]


def _near(after: str, label: str, losses: Sequence[float], floor: float) -> Claim:
    """Return the question whether a loss is near the least possible, with the interval of the mean over seeds."""
    excess = [loss - floor for loss in losses]
    interval = t_interval(excess) if len(excess) > 1 else None
    ends = f" (95 % interval {interval[0]:.4f} to {interval[1]:.4f}, {len(excess)} seeds)" if interval else " (1 seed)"
    return question(
        statement=f"{after}, the loss of {label} is within {NEAR:g} nats per token of the least possible",
        ours=f"{statistics.fmean(excess):.4f} above it{ends}",
        direction=higher([NEAR] * len(excess), excess),
        note=f"the least possible is {floor:.4f}: that of a model which knows the grammar, on the same sequences",
    )


def plot(records: Sequence[Record]) -> Figure:
    """Plot the loss over steps with the least possible loss, and the share of grammatical sentences generated."""
    titles = ["Validation loss, down to the least possible", "Grammatical sentences written"]
    figure, (left, right) = new_figure(titles, ylabels=[LOSS, "share of sentences"], height=3.4)
    draw_means(left, curves_by_label(records, "loss"))
    draw_chance(left, _floor(records), "least possible")
    draw_shares(
        right,
        [textwrap.fill(words, 18) for words in MEASURES.values()],
        {
            arm.label: [[record.result["answers"][measure] for record in seeds.values()] for measure in MEASURES]
            for arm, seeds in by_arm(records).items()
        },
    )
    legend_below(figure, INTERVALS)
    return figure


def _floor(records: Sequence[Record]) -> float:
    """Return the least expected loss on the sequences of the evaluation, in nats per token."""
    task, batches = task_of(records[0].options), evaluation_of(records[0].options)
    assert isinstance(task, CFGTask)
    return statistics.fmean(map(task.loss_floor, batches), weights=[len(batch.input_ids) for batch in batches])


RECIPE = Recipe(
    entry=ENTRY,
    source="Rebuttal; the setting of Allen-Zhu and Li, Physics of Language Models: Part 1",
    arms=arms,
    plot=plot,
    claims=claims,
)
