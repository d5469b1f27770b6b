"""When models of the setting of `decide` begin to copy: the onset of induction, and what the shift gains around it.

The setting and the level were found by the search of the archived recipe `phase`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_chance, draw_means
from kvshift_lab.analysis.learning import StepsToLevel, compare_steps, steps_to_level
from kvshift_lab.analysis.panels import INTERVALS, legend_below, new_figure
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.core.statistics import t_interval
from kvshift_lab.recipes.language_models.settings import WIKI
from kvshift_lab.run.probes import KINDS
from kvshift_lab.run.train_config import OptimizerConfig, TrainConfig
from kvshift_lab.study.arm import Arm, layers_text, pair
from kvshift_lab.study.claims import Claim, higher, lower_loss, question, sooner
from kvshift_lab.study.recipe import Record, accuracy_curve, by_arm, last_loss, value_at

LEVEL = 0.2
"""Prefix matching of the best head from which on a model counts as copying."""

BASE = TrainConfig(
    out=Path(),
    data=replace(WIKI, corpus="wiki2014-en/train-*.jsonl.xz", sequence_length=512),
    optimizer=OptimizerConfig(warmup_steps=100, weight_decay=0.0),
    eval_rows=48,
    save_every=1000,
    log_every=100,
    report_to=(),
    progress=False,
    probes="induction",
)
"""Options that all runs of `decide` and `keys_values` share."""


@dataclass(frozen=True)
class InductionOnset:
    """When each model begins to copy, and what the shift gains before, at and after that point.

    Attributes:
        records: records of models of several depths, without and with the shift, with the same seeds.
    """

    records: Sequence[Record]

    @cached_property
    def models(self) -> dict[Arm, dict[int, Record]]:
        """Records by arm and seed."""
        return by_arm(self.records)

    @cached_property
    def depths(self) -> list[int]:
        """Depths of the models, shallowest first."""
        return sorted({record.options["model"]["num_hidden_layers"] for record in self.records})

    def steps_to_onset(self, arm: Arm) -> StepsToLevel:
        """Return the step at which the prefix matching of each seed reached `LEVEL`."""
        return steps_to_level(
            {seed: accuracy_curve(record, "prefix_matching") for seed, record in self.models[arm].items()}, LEVEL
        )

    def gains(self, layers: int, name: str, steps: Mapping[int, float]) -> list[float]:
        """Return by how much each seed's loss is lower with the shift, after that seed's number of steps.

        Args:
            layers: depth of both models.
            name: name of the loss: "loss", or "loss_" and a kind of target.
            steps: number of steps by seed.
        """
        shifted, vanilla = (self.models[arm] for arm in pair(layers=layers))
        return [
            value_at(vanilla[seed], name, step) - value_at(shifted[seed], name, step) for seed, step in steps.items()
        ]

    def moments(self, layers: int) -> dict[str, dict[int, float]]:
        """Return the moments by name, each as steps by seed; a moment that some seed does not reach is omitted."""
        shifted, vanilla = map(self.steps_to_onset, pair(layers=layers))
        found: dict[str, Mapping[int, float | None]] = {
            "half way to KV-shift's change": {seed: step and step / 2 for seed, step in shifted.steps.items()},
            "at KV-shift's change": shifted.steps,
            "at vanilla's change": vanilla.steps,
            "at the end": dict(vanilla.last_steps),
        }
        return {
            name: {seed: step for seed, step in steps.items() if step is not None}
            for name, steps in found.items()
            if None not in steps.values()
        }

    def sooner_claim(self, ours: Arm, theirs: Arm) -> Claim:
        """Return the question whether one model begins to copy after fewer tokens than another."""
        onsets = [self.steps_to_onset(arm) for arm in (ours, theirs)]
        compared = compare_steps(*onsets, names=(ours.label, theirs.label))
        tokens = tokens_per_step(self.records[0])
        reached = [statistics.geometric_mean(onset.reached) for onset in onsets if onset.reached]
        means = " and ".join(tokens_in_words(steps * tokens) for steps in reached)
        return question(
            statement=f"{ours}: a prefix matching of {LEVEL:g} sooner than {theirs}",
            ours=compared.text.replace("steps", f"steps of {tokens:,} tokens", 1),
            direction=sooner(compared),
            note=f"of those that reach it, after {means} tokens (geometric mean)" if means else "none reaches it",
        )

    def lower_at_end_claim(self, ours: Arm, theirs: Arm) -> Claim:
        """Return the claim that one model has a lower loss than another after the last step."""
        losses = [[last_loss(run) for run in self.models[arm].values()] for arm in (ours, theirs)]
        return lower_loss(f"At the end, {ours}: a lower loss than {theirs}", *losses, names=(ours.label, theirs.label))

    def gain_location_claims(self, layers: int) -> list[Claim]:
        """Return the questions whether the final gain lies on seen pairs, and vanilla is ahead after new tokens."""
        last_steps = self.last_steps(layers)
        seen, new = (self.gains(layers, f"loss_{kind}", last_steps) for kind in ("pair_seen", "neither"))
        return [
            question(
                statement=f"{layers_text(layers)}, at the end: the gain is larger on pairs seen in the row before than "
                "on targets that follow a new token",
                ours=f"{mean_text(seen)} against {mean_text(new)}, "
                f"difference {mean_text([one - other for one, other in zip(seen, new, strict=True)])}",
                direction=higher(seen, new),
                note="nats per token; positions from 64 on",
            ),
            question(
                statement=f"{layers_text(layers)}, at the end: plain attention has the lower loss on targets that "
                "follow a new token",
                ours=f"KV shift gains {mean_text(new)}",
                direction=higher([0.0] * len(new), new),
                note="nats per token; positions from 64 on",
            ),
        ]

    def last_steps(self, layers: int) -> dict[int, float]:
        """Return the last step of each seed."""
        return dict(self.steps_to_onset(Arm(variant="vanilla", layers=layers)).last_steps)

    def table(self) -> str:
        """Return a Markdown table of the gains by kind of target at each moment."""
        kinds = (f"{kind}, positions from 64 on" for kind in KIND_NAMES.values())
        rows: list[tuple[str, ...]] = [("model", "moment", "all targets, all positions", *kinds)]
        for layers in self.depths:
            for name, steps in self.moments(layers).items():
                gains = (self.gains(layers, loss, steps) for loss in ("loss", *(f"loss_{kind}" for kind in KINDS)))
                rows.append((layers_text(layers), name, *map(mean_text, gains)))
        return (
            "The gain, loss without the shift minus loss with it, in nats per token (95 % intervals over seeds). A "
            f"model's change is the moment at which its prefix matching reaches {LEVEL:g}; a moment that some seed "
            "does not reach is left out. The second column counts all positions, so it is not a mean of those after it."
            f"\n\n{as_markdown(rows, left=None)}"
        )


KIND_NAMES = {
    "pair_seen": "pairs seen in the row before",
    "token_seen": "first token seen, with others after it",
    "neither": "first token new in the row",
}


def mean_text(gains: Sequence[float]) -> str:
    """Return the mean of gains over seeds with its 95 % interval, as text."""
    mean = f"{statistics.fmean(gains):+.3f}"
    if len(gains) == 1:
        return mean
    low, high = t_interval(gains)
    return f"{mean} ({low:+.3f} to {high:+.3f})"


def draw_onset(axes: Axes, onset: InductionOnset, arms: Mapping[Arm, str], name: str) -> None:
    """Draw a curve of some arms over tokens, with a vertical line where an arm begins to copy.

    Args:
        axes: where to draw.
        onset: the records.
        arms: labels of the arms to draw.
        name: name of the curve in the records; arms whose records lack it are omitted.
    """
    tokens = tokens_per_step(onset.records[0])
    curves = {}
    for arm, label in arms.items():
        by_seed = {seed: accuracy_curve(record, name) for seed, record in onset.models[arm].items()}
        if any(values for _, values in by_seed.values()):
            curves[label] = {
                seed: ([step * tokens / 1e6 for step in steps], values) for seed, (steps, values) in by_seed.items()
            }
    draw_means(axes, curves, limits=(0, 1) if name == "prefix_matching" else (0, math.inf))
    axes.set_xlabel("million training tokens")
    lines = {line.get_label(): line for line in axes.get_lines()}
    for arm, label in arms.items():
        mean = onset.steps_to_onset(arm).mean
        if mean is not None and label in lines:
            axes.axvline(mean * tokens / 1e6, color=lines[label].get_color(), linestyle=":", linewidth=1)


def draw_copying_level(axes: Axes) -> None:
    """Draw `LEVEL` in a panel of prefix matching, and explain the vertical lines of `draw_onset` in the legend."""
    draw_chance(axes, LEVEL, f"prefix matching of {LEVEL:g}; vertical line: where it is passed (geometric mean)")


def plot_onset(arms: Sequence[Arm], records: Sequence[Record]) -> Figure:
    """Plot prefix matching, and the loss on pairs of tokens seen before and on all targets, over tokens."""
    onset = InductionOnset(records)
    titles = {
        "prefix_matching": "Prefix matching, best head",
        "loss_pair_seen": "Loss, pair seen before",
        "loss": "Loss, all targets",
    }
    figure, panels = new_figure([*titles.values()], ylabels=["prefix matching", "nats per token", ""])
    panels[2].sharey(panels[1])
    for axes, name in zip(panels, titles, strict=True):
        draw_onset(axes, onset, {arm: arm.label for arm in arms}, name)
    draw_copying_level(panels[0])
    legend_below(figure, INTERVALS)
    return figure


def tokens_per_step(record: Record) -> int:
    """Return the tokens per step over all processes."""
    options = record.options
    return options["tokens_per_step"] or options["batch_size"] * options["data"]["sequence_length"]


def tokens_in_words(tokens: float) -> str:
    """Return a number of tokens in words, such as "1.5 million"."""
    return f"{tokens / 1e6:.1f} million"
