"""Figure 4: vanilla and KV shift over seeds and learning rates, and which of them diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_curves
from kvshift_lab.analysis.panels import LOSS, legend_below, new_figure
from kvshift_lab.recipes.fig04 import ENTRY
from kvshift_lab.recipes.language_models.settings import LARGE, TABLES, GridPoint, Setting, arm_job, loss_claim
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, higher, not_testable, sign_test
from kvshift_lab.study.jobs import StudyJob
from kvshift_lab.study.recipe import (
    Recipe,
    Record,
    accuracy_curve,
    accuracy_curves,
    by_arm,
    has_diverged,
    paired_losses,
)
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA, VARIANTS

PAPER_RATES = (1e-4, 2e-4, 1e-3, 1e-2)
"""Learning rates of the paper; smaller models train at these times `Setting.scale` (4 in laptop, 16 in smoke)."""
RISE = 0.5
"""A run that ends more than this many nats per token above its own lowest loss has also diverged."""

_LATER = OptimizerConfig(warmup_steps=40)
"""AdamW with weight decay, clipping, a constant rate and warm-up over a tenth of all steps, all as in Table 16."""


def figure_setting(preset: str) -> tuple[Setting, GridPoint]:
    """Return the training setting of a preset, and the model and context length."""
    if preset == "paper":
        setting = LARGE["1.5B"]
        return setting, setting.points[0]
    setting = TABLES[preset]
    warmup = _LATER if preset == "laptop" else replace(_LATER, warmup_steps=1)
    return replace(setting, config=replace(setting.config, optimizer=warmup)), setting.points[0]


def arms(preset: str) -> list[StudyJob]:
    """Return a job for each learning rate, with and without KV shift; arms have the paper's rate."""
    setting, point = figure_setting(preset)
    return [
        replace(arm_job(setting, point, variant).at_rate(rate * setting.scale), arm=Arm(variant=variant, rate=rate))
        for rate in PAPER_RATES
        for variant in SHIFTED_AND_VANILLA
    ]


def has_diverged_or_risen(record: Record) -> bool:
    """Return True if the run met a non-finite number or its final loss is more than `RISE` above its lowest loss."""
    if has_diverged(record):
        return True
    losses = accuracy_curve(record, "loss")[1]
    return losses[-1] - min(losses) > RISE


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims about the lower loss at each rate, and about divergence at the highest rate."""
    models = by_arm(records)
    runs = {
        (variant, rate): models[Arm(variant=variant, rate=rate)]
        for variant in SHIFTED_AND_VANILLA
        for rate in PAPER_RATES
    }
    found = []
    for rate in PAPER_RATES:
        shifted, vanilla = (runs[variant, rate] for variant in SHIFTED_AND_VANILLA)
        found.append(
            loss_claim(
                paired_losses(shifted, vanilla),
                (VARIANTS["kv-shift"].label, VARIANTS["vanilla"].label),
                statement=f"At the paper's rate {rate:g}, KV-shift has a lower loss than vanilla",
                paper="always better, over 5 seeds" if rate == PAPER_RATES[1] else "better, without numbers",
                note=f"at {_rate_of(shifted):g} here",
            )
        )
    shifted, vanilla = (runs[variant, PAPER_RATES[-1]] for variant in SHIFTED_AND_VANILLA)
    both = [has_diverged_or_risen(vanilla[seed]) and not has_diverged_or_risen(shifted[seed]) for seed in shifted]
    diverges = Claim(
        statement=f"At the paper's rate {PAPER_RATES[-1]:g}, vanilla diverges and KV-shift does not",
        paper="in 5 of 5 seeds",
        ours=f"in {sum(both)} of {len(both)} seeds; "
        f"vanilla diverges in {sum(map(has_diverged_or_risen, vanilla.values()))}, "
        f"KV-shift in {sum(map(has_diverged_or_risen, shifted.values()))}",
        direction=sign_test(sum(both), len(both) - sum(both)),
        note=f"at {_rate_of(shifted):g} here; to diverge is to end at no finite number, or {RISE} nats above one's own "
        "lowest loss",
    )
    is_small = records[0].options["model"].get("size") is None
    if is_small and not any(map(has_diverged_or_risen, vanilla.values())):
        diverges = not_testable(diverges, "a model so small, clipped and after so few steps, does not diverge at all")
    return [*found, diverges, _at_low_rates(runs)]


def _at_low_rates(runs: Mapping[tuple[str, float], Mapping[int, Record]]) -> Claim:
    """Return the claim, raised by a reviewer, that the gain is larger at the second highest rate than at the lowest."""
    high, low = PAPER_RATES[-2], PAPER_RATES[0]
    pairs = [paired_losses(*(runs[variant, rate] for variant in SHIFTED_AND_VANILLA)) for rate in (high, low)]
    gains = [[vanilla - shifted for shifted, vanilla in known] for known in pairs if known]
    return loss_claim(
        [*zip(*gains, strict=True)] if len(gains) == 2 else None,
        (f"the gain at {high:g}", f"that at {low:g}"),
        higher,
        statement=f"The gain is larger at the paper's rate {high:g} than at {low:g}",
        paper="a reviewer asked whether the gain shrinks at low rates",
        own=True,
    )


def _rate_of(seeds: Mapping[int, Record]) -> float:
    return next(iter(seeds.values())).options["optimizer"]["learning_rate"]


def plot(records: Sequence[Record]) -> Figure:
    """Plot the loss over steps, one panel for each rate."""
    models = by_arm(records)
    runs = [
        {variant: models[Arm(variant=variant, rate=rate)] for variant in SHIFTED_AND_VANILLA} for rate in PAPER_RATES
    ]
    titles = [
        f"learning rate {_rate_of(found['vanilla']):g} (in the paper {rate:g})"
        for found, rate in zip(runs, PAPER_RATES, strict=True)
    ]
    figure, panels = new_figure(titles, ylabels=[LOSS], sharey=True)
    for axes, found in zip(panels, runs, strict=True):
        draw_curves(axes, {VARIANTS[variant].label: accuracy_curves(seeds, "loss") for variant, seeds in found.items()})
    legend_below(figure)
    return figure


RECIPE = Recipe(
    entry=ENTRY,
    source="Figure 4",
    arms=arms,
    plot=plot,
    claims=claims,
)
