"""Figure 1b: at width 8, one layer with KV shift is ahead of two layers without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvshift_lab.recipes.fig01a import study as fig01a
from kvshift_lab.recipes.fig01b import ENTRY
from kvshift_lab.recipes.induction.induction_accuracy import (
    LAST,
    SCORED,
    chance,
    final_accuracy,
    plot_induction,
    steps_to_level_by_arm,
)
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, higher, percent, points
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.models import paper_proportions
from kvshift_lab.study.recipe import Recipe, Record, by_arm
from kvshift_lab.study.tuning import reached_soonest

MODELS = ((2, "vanilla"), (1, "kv-shift"))  # layers, variant
WIDTH = 8

PAPER = replace(fig01a.PAPER, steps=20_000)
LAPTOP = replace(
    fig01a.LAPTOP,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=100, clip_norm=0.0),
    eval_every=100,
    eval_rows=2048,
    stop_at=0.999,
)
SIZES = {"paper": PAPER, "laptop": LAPTOP, "smoke": fig01a.SMOKE}


def arms(preset: str) -> list[TrainingJob]:
    """Return a job for each model."""
    return [
        TrainingJob(
            arm=Arm(variant=variant, layers=layers),
            config=replace(SIZES[preset], model=paper_proportions(WIDTH, layers, variant, heads=1)),
        )
        for layers, variant in MODELS
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claim that one layer with KV shift is ahead of two layers without."""
    models = by_arm(records)
    shifted, vanilla = (Arm(variant=variant, layers=layers) for layers, variant in MODELS[::-1])
    ours, theirs = (final_accuracy(models[arm]) for arm in (shifted, vanilla))
    reach = steps_to_level_by_arm(records, 0.9)
    steps = max(record.options["steps"] for record in records)
    return [
        Claim(
            statement=f"At width 8, one layer with KV shift is ahead of two layers without after {steps:,} steps",
            paper="near 100 % against very poor",
            ours=f"{percent(ours)} against {percent(theirs)}: {points(ours, theirs)}; KV-shift {reach[shifted].text}",
            direction=higher(ours, theirs),
            note=f"the mean of the last {LAST} evaluations; the paper's axes are not legible; chance among tokens of a "
            f"sequence is {100 * chance(records):.1f} %",
        ),
    ]


RECIPE = Recipe(
    entry=ENTRY,
    source="Figure 1b, Section 3.1, Appendix K",
    arms=arms,
    plot=partial(plot_induction, title="Induction at width 8"),
    claims=claims,
    tuned_by=reached_soonest(SCORED, 0.9, last=LAST),
    scored=SCORED,
)
