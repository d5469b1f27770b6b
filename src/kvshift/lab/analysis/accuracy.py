"""Curves of accuracy over training steps, a color for each model and a line for each seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvshift.lab.analysis.colors import COLORS

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes

__all__ = ["Curves", "draw_accuracy", "draw_shares", "share_place"]

Curves = Mapping[str, Mapping[int, tuple[Sequence[float], Sequence[float]]]]
"""By model and seed: steps, and a value at each."""


def draw_accuracy(
    axes: Axes, curves: Curves, *, title: str, ylabel: str = "accuracy", chance: float | None = None
) -> None:
    """Draw the curves of all models into `axes`.

    Args:
        axes: of matplotlib.
        curves: see `Curves`; a curve that ends early was stopped because the task was learned.
        title, ylabel: of the axes.
        chance: level of a guess, drawn as a dotted line.
    """
    for color, (label, seeds) in zip(COLORS, curves.items(), strict=False):
        for number, (steps, values) in enumerate(seeds.values()):
            axes.plot(steps, values, color=color, linewidth=1.3, alpha=0.85, label="" if number else label)
            axes.plot(steps[-1:], values[-1:], "o", color=color, markersize=3)
    if chance is not None:
        axes.axhline(chance, color="black", linestyle=":", linewidth=0.9, label="chance")
    axes.set(xlabel="step", ylabel=ylabel, title=title, ylim=(-0.02, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(framealpha=0.9, edgecolor="none")


def draw_shares(axes: Axes, shares: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> None:
    """Draw shares with their standard errors, side by side.

    Args:
        axes: of matplotlib; the first group of points stands at 0, the next at 1.
        shares: by model, then by group, "share" and "stderr" of each run.
    """
    for at, ((label, groups), color) in enumerate(zip(shares.items(), COLORS, strict=False)):
        for place, runs in enumerate(groups):
            for number, found in enumerate(runs):
                axes.errorbar(
                    share_place(place, at) + 0.03 * number,
                    found["share"],
                    yerr=found["stderr"],
                    fmt="o",
                    markersize=4,
                    color=color,
                    label="" if number or place else label,
                )


def share_place(group: int, model: int) -> float:
    """Where in a group the runs of a model begin."""
    return group + 0.2 * model - 0.1
