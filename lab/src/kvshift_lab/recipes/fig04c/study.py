"""Figure 4c at rates that are doubled, without clipping and QK-norm, until plain attention diverges.

In the laptop preset of `fig04`, no run diverges, so nothing is tested. Here, its setting has no clipping and no
QK-norm, and its highest rate is doubled again and again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_curves
from kvshift_lab.analysis.panels import LOSS, legend_below, new_figure
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.recipes.fig04.study import PAPER_RATES, RISE, figure_setting, has_diverged_or_risen
from kvshift_lab.recipes.fig04c import ENTRY
from kvshift_lab.recipes.language_models.settings import arm_job, loss_claim
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, not_testable, question, sign_test
from kvshift_lab.study.jobs import StudyJob
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curves, by_arm, has_diverged, last_loss, paired_losses
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA, VARIANTS

DOUBLINGS = 6
"""Number of rates, of which the first is the highest of `fig04`."""
_LABELS = {variant: VARIANTS[variant].label for variant in SHIFTED_AND_VANILLA}


def rates(preset: str) -> list[float]:
    """Return the learning rates of a preset."""
    first = PAPER_RATES[-1] * figure_setting(preset)[0].scale
    doubled = [first * 2**doubling for doubling in range(2 if preset == "smoke" else DOUBLINGS)]
    return [float(f"{rate:.2g}") for rate in doubled]  # as in the labels of arms


def arms(preset: str) -> list[StudyJob]:
    """Return a job for each learning rate, with and without KV shift."""
    return [_job(preset, variant, rate) for rate in rates(preset) for variant in SHIFTED_AND_VANILLA]


def _job(preset: str, variant: str, rate: float) -> StudyJob:
    job = arm_job(*figure_setting(preset), variant)
    config = replace(
        job.config,
        model=replace(job.config.model, qk_norm=False),
        optimizer=replace(job.config.optimizer, learning_rate=rate, clip_norm=0.0),
        eval_every=max(1, job.config.steps // 10),  # a rise is measured from the lowest of these
    )
    return replace(job, arm=Arm(variant=variant, rate=rate), config=config)


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claim of the figure at the first rate at which vanilla diverges in half of the seeds, then our own."""
    diverged = _diverged(records)
    return [_at_first_rate(diverged), _by_seed(diverged), *_lower_at_each_rate(records)]


def _diverged(records: Sequence[Record]) -> dict[str, dict[float, dict[int, bool]]]:
    """Return whether each run has diverged, by variant, rate (ascending) and seed."""
    models = by_arm(records)
    found = sorted({record.arm.rate or 0.0 for record in records})
    return {
        variant: {
            rate: {seed: has_diverged_or_risen(run) for seed, run in models[Arm(variant=variant, rate=rate)].items()}
            for rate in found
        }
        for variant in SHIFTED_AND_VANILLA
    }


def _at_first_rate(diverged: Mapping[str, Mapping[float, Mapping[int, bool]]]) -> Claim:
    shifted, vanilla = (diverged[variant] for variant in SHIFTED_AND_VANILLA)
    in_half = [rate for rate, runs in vanilla.items() if sum(runs.values()) >= len(runs) / 2]
    rate = min(in_half, default=max(vanilla))
    right = sum(vanilla[rate][seed] and not shifted[rate][seed] for seed in shifted[rate])
    wrong = sum(shifted[rate][seed] and not vanilla[rate][seed] for seed in shifted[rate])
    claim = Claim(
        statement="At the lowest rate at which vanilla diverges in half of the seeds, vanilla diverges and KV-shift "
        "does not",
        paper="in 5 of 5 seeds, at 1e-2",
        ours=f"at {rate:g}, vanilla diverges in {sum(vanilla[rate].values())} and KV-shift in "
        f"{sum(shifted[rate].values())} of {len(shifted[rate])} seeds; vanilla alone in {right}, KV-shift alone in "
        f"{wrong}",
        direction=sign_test(right, wrong),
        note=f"to diverge is to end at no finite number, or {RISE} nats above one's own lowest loss",
    )
    return claim if in_half else not_testable(claim, "vanilla diverges in half of the seeds at none of these rates")


def _by_seed(diverged: Mapping[str, Mapping[float, Mapping[int, bool]]]) -> Claim:
    shifted, vanilla = (_lowest(diverged[variant]) for variant in SHIFTED_AND_VANILLA)
    right, wrong = (
        sum(first[seed] < second[seed] for seed in first) for first, second in ((vanilla, shifted), (shifted, vanilla))
    )
    return question(
        statement="By seed, vanilla diverges at a lower rate than KV-shift",
        ours=f"in {right} of {len(vanilla)} seeds, at a higher one in {wrong}; lowest rates at which it diverges: "
        f"vanilla {_rates_text(vanilla)}; KV-shift {_rates_text(shifted)}",
        direction=sign_test(right, wrong),
        note="of rates that are doubled; equal rates decide nothing",
    )


def _lower_at_each_rate(records: Sequence[Record]) -> list[Claim]:
    models = by_arm(records)
    found = sorted({record.arm.rate or 0.0 for record in records})
    pairs = {rate: [models[Arm(variant=variant, rate=rate)] for variant in SHIFTED_AND_VANILLA] for rate in found}
    return [
        loss_claim(
            paired_losses(*pairs[rate]),
            (_LABELS["kv-shift"], _LABELS["vanilla"]),
            statement=f"At {rate:g}, KV-shift has a lower loss than vanilla",
            paper="better at each of its rates",
            own=True,
        )
        for rate in found
    ]


def _lowest(by_rate: Mapping[float, Mapping[int, bool]]) -> dict[int, float]:
    """Return the lowest rate at which each seed diverges; infinity for none."""
    seeds = next(iter(by_rate.values()))
    return {seed: min((rate for rate, runs in by_rate.items() if runs[seed]), default=float("inf")) for seed in seeds}


def _rates_text(lowest: Mapping[int, float]) -> str:
    return ", ".join("none" if rate == float("inf") else f"{rate:g}" for rate in sorted(lowest.values()))


def table(records: Sequence[Record]) -> str:
    """Return a Markdown table of how many runs diverge and the mean last loss of the others, by rate."""
    models = by_arm(records)
    rows = [
        ("rate", *(f"{label}: {what}" for label in _LABELS.values() for what in ("diverged", "loss of the others")))
    ]
    for rate in sorted({record.arm.rate or 0.0 for record in records}):
        cells = []
        for variant in _LABELS:
            runs = models[Arm(variant=variant, rate=rate)].values()
            stable = [last_loss(run) for run in runs if not has_diverged_or_risen(run)]
            cells += [f"{len(runs) - len(stable)} of {len(runs)}", f"{statistics.fmean(stable):.3f}" if stable else "-"]
        rows.append((f"{rate:g}", *cells))
    return as_markdown(rows)


def plot(records: Sequence[Record]) -> Figure:
    """Plot the loss over steps, one panel for each rate; runs that met a number that is not finite are omitted."""
    models = by_arm(records)
    found = sorted({record.arm.rate or 0.0 for record in records})
    figure, panels = new_figure([f"learning rate {rate:g}" for rate in found], ylabels=[LOSS], sharey=True)
    for axes, rate in zip(panels, found, strict=True):
        curves = {}
        for variant, label in _LABELS.items():
            runs = models[Arm(variant=variant, rate=rate)]
            curves[label] = accuracy_curves({seed: run for seed, run in runs.items() if not has_diverged(run)}, "loss")
        draw_curves(axes, {label: seeds for label, seeds in curves.items() if seeds})
    legend_below(figure)
    return figure


RECIPE = Recipe(
    entry=ENTRY,
    source="Figure 4c",
    arms=arms,
    plot=plot,
    claims=claims,
    tables=table,
)
