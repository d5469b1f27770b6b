"""Plots of curves over training steps and of grouped values, with a color and a marker for each variant."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvshift_lab.analysis.colors import colors_of, marker_of, shades
from kvshift_lab.analysis.panels import count_steps
from kvshift_lab.core.statistics import t_interval
from kvshift_lab.variants.by_name import VARIANTS

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes

Seeds = Mapping[int, tuple[Sequence[float], Sequence[float]]]
"""For each seed, the steps and the value at each step."""

Curves = Mapping[str, Seeds]
"""Curves by model, named "VARIANT" or "VARIANT, SIZE"."""

_FEW = 6  # maximum number of steps for which intervals are drawn as bars
_STYLES = ("-", "--", "-.", ":")  # line styles of the sizes of a variant
_LABELS = {entry.label for entry in VARIANTS.values()}


def _styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each label: variants differ in color and marker, their sizes in shade and line style."""
    parts = {label: (label, "") if label in _LABELS else label.partition(", ")[::2] for label in labels}
    colors = colors_of(variant for variant, _ in parts.values())
    sizes = sorted({size for _, size in parts.values()})
    found = {}
    for label, (variant, size) in parts.items():
        of_variant = sorted(size for name, size in parts.values() if name == variant)
        found[label] = {
            "color": shades(colors[variant], len(of_variant))[of_variant.index(size)],
            "linestyle": _STYLES[sizes.index(size) % len(_STYLES)],
            "marker": marker_of(variant, colors),
        }
    return found


def draw_curves(axes: Axes, curves: Curves) -> None:
    """Draw the curves of all models over steps, one line per seed.

    A run that ends early was stopped because the task was learned; a marker shows its end.
    """
    styles = _styles(list(curves))
    for label, seeds in curves.items():
        for number, (steps, values) in enumerate(seeds.values()):
            axes.plot(
                steps,
                values,
                linewidth=1.3,
                alpha=0.85,
                markersize=4,
                markevery=sorted({*range(0, len(steps), max(1, len(steps) // 6)), len(steps) - 1}),
                label="" if number else label,
                **styles[label],
            )
    count_steps(axes)


def draw_means(axes: Axes, curves: Curves, *, limits: tuple[float, float] = (-math.inf, math.inf)) -> None:
    """Draw the mean over seeds of each model's curves with its 95 % interval: a band, or bars for at most 6 steps.

    The mean is drawn at the steps that all seeds have in common. Two seeds are drawn as thin lines, because their
    interval is far wider than what they show. The bars of different models are drawn side by side.

    Args:
        axes: The axes of matplotlib.
        curves: Values by model; see `Curves`.
        limits: The least and the largest possible value, at which intervals are cut.
    """
    styles = _styles(list(curves))
    for at, (label, seeds) in enumerate(curves.items()):
        steps, means = _mean(seeds)
        ends = [_interval(values, limits) for values in _columns(seeds).values()] if len(seeds) > 2 else []
        for points in seeds.values() if len(seeds) == 2 else ():
            axes.plot(*points, color=styles[label]["color"], alpha=0.6, linewidth=0.7)
        how = {"markersize": 4, "label": label if steps else "", **styles[label]}
        if ends and len(steps) <= _FEW:
            apart = 0.05 * (at - (len(curves) - 1) / 2) * (steps[-1] - steps[0]) / max(1, len(steps) - 1)
            errors = [
                [abs(end - mean) for end, mean in zip(side, means, strict=True)] for side in zip(*ends, strict=True)
            ]
            axes.errorbar([step + apart for step in steps], means, yerr=errors, capsize=2.5, elinewidth=1, **how)
        else:
            axes.plot(steps, means, **how)
        if ends and len(steps) > _FEW:
            low, high = zip(*ends, strict=True)
            axes.fill_between(steps, low, high, color=styles[label]["color"], alpha=0.18, linewidth=0)
    count_steps(axes)


def draw_dotted(axes: Axes, curves: Curves) -> None:
    """Draw the mean over seeds of each model's curves, such as training losses, as a dotted line without a label."""
    styles = _styles(list(curves))
    for label, seeds in curves.items():
        axes.plot(*_mean(seeds), color=styles[label]["color"], linestyle=":", linewidth=1.2)


def curve_difference(curve: Seeds, other: Seeds) -> Seeds:
    """Return the difference of the curves of two models for each seed, at the steps that both have."""
    found = {}
    for seed, points in curve.items():
        theirs = dict(zip(*other[seed], strict=True))
        pairs = [(step, value - theirs[step]) for step, value in zip(*points, strict=True) if step in theirs]
        found[seed] = ([step for step, _ in pairs], [value for _, value in pairs])
    return found


def _interval(values: Sequence[float], limits: tuple[float, float]) -> tuple[float, float]:
    low, high = t_interval(values)
    return max(low, limits[0]), min(high, limits[1])


def _columns(seeds: Seeds) -> dict[float, list[float]]:
    """Return the values of all seeds at each step that all seeds have."""
    by_step = [dict(zip(*curve, strict=True)) for curve in seeds.values()]
    return {
        step: [curve[step] for curve in by_step]
        for step in (by_step[0] if by_step else ())
        if all(step in curve for curve in by_step)
    }


def _mean(seeds: Seeds) -> tuple[list[float], list[float]]:
    columns = _columns(seeds)
    return list(columns), [statistics.fmean(values) for values in columns.values()]


def draw_chance(axes: Axes, level: float, label: str = "chance") -> None:
    """Draw a dotted line at a level that needs no model, such as the accuracy of guessing."""
    axes.axhline(level, color="black", linestyle=":", linewidth=0.9, label=label)


def draw_accuracy(axes: Axes, curves: Curves, *, chance: float | None = None) -> None:
    """Draw accuracy curves like `draw_curves`, on an axis from 0 to 1.

    Args:
        axes: The axes of matplotlib.
        curves: Accuracies by model; see `Curves`.
        chance: Accuracy of guessing, drawn as a dotted line. None: no line.
    """
    draw_curves(axes, curves)
    if chance is not None:
        draw_chance(axes, chance)
    axes.set_ylim(-0.02, 1.02)


def draw_groups(
    axes: Axes, groups: Sequence[str], values: Mapping[str, Sequence[Sequence[float]]], *, interval: bool = False
) -> None:
    """Draw the values of models side by side in groups: a dot for each seed, and a larger marker for their mean.

    Args:
        axes: The axes of matplotlib. The groups are at x = 0, 1, ...
        groups: Names of the groups.
        values: Values of the seeds, by label and then by group.
        interval: Also draw the 95 % interval of each mean.
    """
    styles = _styles(list(values))
    for at, (label, of_groups) in enumerate(values.items()):
        color, marker = styles[label]["color"], styles[label]["marker"]
        first = next((group for group, found in enumerate(of_groups) if found), None)
        for group, found in enumerate(of_groups):
            if not found:
                continue
            place, mean = _place(group, at, len(values)), statistics.fmean(found)
            axes.plot([place + 0.04] * len(found), found, ".", color=color, alpha=0.7)
            low, high = t_interval(found) if interval and len(found) > 1 else (mean, mean)
            errors = [[mean - low], [high - mean]] if interval else None
            how = {"fmt": marker, "color": color, "markersize": 6, "capsize": 3}
            axes.errorbar(place, mean, yerr=errors, label=label if group == first else "", **how)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.5, len(groups) - 0.5)


def draw_shares(
    axes: Axes, groups: Sequence[str], shares: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]
) -> None:
    """Draw the shares of models, between 0 and 1, side by side in groups, with their standard errors.

    Args:
        axes: The axes of matplotlib. The groups are at x = 0, 1, ...
        groups: Names of the groups.
        shares: "share" and "stderr" of each run, by label and then by group.
    """
    styles = _styles(list(shares))
    for at, (label, of_groups) in enumerate(shares.items()):
        for group, runs in enumerate(of_groups):
            for number, found in enumerate(runs):
                axes.errorbar(
                    _place(group, at, len(shares)) + 0.04 * (number - (len(runs) - 1) / 2),
                    found["share"],
                    yerr=found["stderr"],
                    fmt=styles[label]["marker"],
                    markersize=4,
                    color=styles[label]["color"],
                    label="" if number or group else label,
                )
    axes.set_xticks(range(len(groups)), groups)
    axes.set(ylim=(-0.02, 1.02), xlim=(-0.5, len(groups) - 0.5))


def _place(group: int, model: int, models: int) -> float:
    """Return the x position of a model within a group."""
    return group + 0.6 * ((model + 0.5) / models - 0.5)
