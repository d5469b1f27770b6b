"""Accuracy over training steps, and shares of right answers: a color for each variant, a line or dot for each seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvshift.lab.analysis.colors import colors_of
from kvshift.lab.analysis.panels import count_steps

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes

__all__ = ["Curves", "draw_accuracy", "draw_chance", "draw_curves", "draw_shares", "share_position"]

Curves = Mapping[str, Mapping[int, tuple[Sequence[float], Sequence[float]]]]
"""By model, "VARIANT" or "VARIANT, SIZE", and seed: steps, and a value at each."""

_STYLES = ("-", "--", "-.", (0, (1, 1)))  # of the sizes of one variant


def draw_curves(axes: Axes, curves: Curves) -> None:
    """Draw the curves of all models into `axes`, over steps: variants differ by color, their sizes by line style.

    A curve that ends early was stopped because the task was learned; its end is marked.
    """
    parts = {label: label.partition(", ")[::2] for label in curves}
    colors = colors_of(variant for variant, _ in parts.values())
    sizes = sorted({size for _, size in parts.values()})
    for label, seeds in curves.items():
        variant, size = parts[label]
        color, style = colors[variant], _STYLES[sizes.index(size) % len(_STYLES)]
        for number, (steps, values) in enumerate(seeds.values()):
            name = "" if number else label
            axes.plot(steps, values, color=color, linestyle=style, linewidth=1.3, alpha=0.85, label=name)
            axes.plot(steps[-1:], values[-1:], "o", color=color, markersize=3)
    count_steps(axes)
    axes.grid(alpha=0.25)


def draw_chance(axes: Axes, level: float, label: str = "chance") -> None:
    """A dotted line at a level that takes no model."""
    axes.axhline(level, color="black", linestyle=":", linewidth=0.9, label=label)


def draw_accuracy(
    axes: Axes, curves: Curves, *, title: str, ylabel: str = "accuracy", chance: float | None = None
) -> None:
    """`draw_curves` on an axis from 0 to 1.

    Args:
        axes: of matplotlib.
        curves: see `Curves`.
        title, ylabel: of the axes.
        chance: the accuracy of guessing, drawn as a dotted line.
    """
    draw_curves(axes, curves)
    if chance is not None:
        draw_chance(axes, chance)
    axes.set(ylabel=ylabel, title=title, ylim=(-0.02, 1.02))


def draw_shares(axes: Axes, shares: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> None:
    """Draw shares with their standard errors, side by side.

    Args:
        axes: of matplotlib; the first group of points stands at 0, the next at 1.
        shares: by variant, then by group, "share" and "stderr" of each run.
    """
    colors = colors_of(shares)
    for at, (label, groups) in enumerate(shares.items()):
        for group, runs in enumerate(groups):
            for number, found in enumerate(runs):
                axes.errorbar(
                    share_position(group, at) + 0.03 * number,
                    found["share"],
                    yerr=found["stderr"],
                    fmt="o",
                    markersize=4,
                    color=colors[label],
                    label="" if number or group else label,
                )


def share_position(group: int, model: int) -> float:
    """Where in a group the runs of a model begin."""
    return group + 0.2 * model - 0.1
