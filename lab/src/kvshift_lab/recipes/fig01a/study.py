"""Figure 1a: one layer with KV shift learns induction, and does so sooner than two layers without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvshift_lab.analysis.learning import compare_steps
from kvshift_lab.recipes.fig01a import ENTRY
from kvshift_lab.recipes.induction.induction_accuracy import (
    LAST,
    SCORED,
    chance,
    final_accuracy,
    plot_induction,
    steps_to_level_by_arm,
)
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.run.train_task import TaskTrainConfig
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, at_most, higher, percent, reached, sooner
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.models import paper_proportions
from kvshift_lab.study.recipe import Recipe, Record, by_arm
from kvshift_lab.study.tuning import reached_soonest
from kvshift_lab.tasks import InductionConfig

MODELS = ((4, "vanilla"), (2, "vanilla"), (1, "vanilla"), (1, "kv-shift"))  # the longest run first

PAPER = TaskTrainConfig(
    out=Path(),
    task=InductionConfig(),  # 512 tokens of 7,989
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=1000, clip_norm=0.0),
    steps=5000,
    batch_size=512,
    accumulation=8,  # the paper: 512 sequences on each of 8 GPUs
    eval_every=50,
    eval_rows=2048,
    eval_batch_size=256,
    data_workers=4,  # one core makes 4,096 sequences of 512 tokens in 0.15 seconds
    stop_at=0.999,
)
LAPTOP = replace(
    PAPER,
    # Few distinct tokens with many repeats of each, so that two layers without shift also learn it in reasonable time.
    task=InductionConfig(length=96, vocab_size=75, pool=24),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100, clip_norm=0.0),
    steps=3000,
    batch_size=64,
    accumulation=1,
    eval_every=25,
    eval_rows=512,
    data_workers=0,
    stop_at=0.99,  # four layers without shift level off at 99.5 %
)
SMOKE = replace(
    LAPTOP, task=InductionConfig(length=16, vocab_size=64), steps=6, batch_size=8, eval_every=3, eval_rows=16
)

# By preset: config, width and heads.
SIZES = {"paper": (PAPER, 1024, 8), "laptop": (LAPTOP, 64, 4), "smoke": (SMOKE, 16, 2)}


def arms(preset: str) -> list[TrainingJob]:
    """Return a job for each model."""
    config, width, heads = SIZES[preset]
    return [
        TrainingJob(
            arm=Arm(variant=variant, layers=layers),
            config=replace(config, model=paper_proportions(width, layers, variant, heads=heads)),
        )
        for layers, variant in MODELS
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the paper's four claims about the figure; speeds are compared at an accuracy of 90 %."""
    models = by_arm(records)
    ours, one, two, four = (
        Arm(variant=variant, layers=layers)
        for layers, variant in ((1, "kv-shift"), (1, "vanilla"), (2, "vanilla"), (4, "vanilla"))
    )
    reach, at_90 = steps_to_level_by_arm(records, 0.99), steps_to_level_by_arm(records, 0.9)
    alone = final_accuracy(models[one])
    against_two = compare_steps(at_90[ours], at_90[two], names=(ours.label, two.label))
    deeper = compare_steps(at_90[four], at_90[two], names=(four.label, two.label))
    steps = max(record.options["steps"] for record in records)
    return [
        Claim(
            statement=f"One layer with KV shift learns induction within {steps:,} steps",
            paper="about 100 %",
            ours=f"{percent(final_accuracy(models[ours]))}; {reach[ours].text}",
            direction=reached(reach[ours], steps),
            note="learns means 99 %",
        ),
        Claim(
            statement=f"One layer without KV shift does not learn the task in {steps:,} steps",
            paper="fails",
            ours=percent(alone),
            direction=higher([0.9] * len(alone), alone),
            note=f"does not means less than 90 %; highest of all seeds {100 * max(alone):.1f} %, chance is "
            f"{100 * chance(records):.1f} %",
        ),
        Claim(
            statement="One layer with KV shift reaches 90 % in at most half the steps of two layers without",
            paper="much earlier (the axis is not legible in the paper)",
            ours=against_two.text,
            direction=at_most(against_two, 0.5),
            note="the paper gives no ratio",
        ),
        Claim(
            statement="Four layers without reach 90 % no sooner than two",
            paper="no faster",
            ours=deeper.text,
            direction=sooner(compare_steps(at_90[two], at_90[four])),
            note="the paper gives no ratio",
        ),
    ]


RECIPE = Recipe(
    entry=ENTRY,
    source="Figure 1a, Section 3.1, Appendix K",
    arms=arms,
    plot=partial(plot_induction, title="Induction, one layer and more"),
    claims=claims,
    tuned_by=reached_soonest(SCORED, 0.9, last=LAST),
    scored=SCORED,
)
