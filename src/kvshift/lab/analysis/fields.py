"""Figure 2 drawn: contour lines of a loss over the square, the streamlines of descent, and the flow that leaves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvshift.lab.analysis.colors import BLUE, GREEN, PURPLE, VERMILLION
from kvshift.lab.theory.gradient_flow import Trajectory
from kvshift.lab.theory.loss_field import LEVELS, Field

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_field", "draw_fields", "draw_flow"]

_LINES = {"$α_1$": (GREEN, "-"), "$α_2$": (GREEN, "--"), "$β_1$": (PURPLE, "-"), "$β_2$": (PURPLE, "--")}


def draw_fields(rows: Mapping[str, Mapping[str, Field]], levels: Sequence[float] | np.ndarray = LEVELS) -> Figure:
    """A panel for each field; see `draw_field`.

    Args:
        rows: by name of the row, then by title of the panel.
        levels: of the contour lines, in nats; those of appendix L by default.
    """
    from matplotlib.figure import Figure

    columns = max((len(panels) for panels in rows.values()), default=0)
    if columns == 0:
        raise ValueError("rows must hold at least one field, got none")
    figure = Figure(figsize=(3.2 * columns, 3.3 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, panels) in zip(grid, rows.items(), strict=True):
        for axes in line[len(panels) :]:
            axes.remove()
        for axes, (title, field) in zip(line, panels.items(), strict=False):
            draw_field(axes, field, title=f"{name}, {title}", levels=levels)
    return figure


def draw_field(axes: Axes, field: Field, *, title: str, levels: Sequence[float] | np.ndarray = LEVELS) -> None:
    """Contour lines of the loss and streamlines of descent; a dot marks induction.

    A field that no level crosses says between which losses it lies: it is not flat, the levels miss it.
    """
    axes.streamplot(
        field.alpha1,
        field.beta1,
        field.alpha1_step,
        field.beta1_step,
        color=BLUE,
        linewidth=0.7,
        density=0.8,
    )
    low, high = float(field.loss.min()), float(field.loss.max())
    crossed = [level for level in levels if low < level < high]
    if crossed:
        axes.contour(field.alpha1, field.beta1, field.loss, levels=crossed, colors="black", linewidths=0.6)
    else:
        axes.text(0.5, 0.5, f"no level in\n{low:.2f} to {high:.2f}", ha="center", va="center").set_bbox(
            {"facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        )
    axes.plot(0, 1, "o", color=VERMILLION, markersize=7, clip_on=False, zorder=5)
    axes.set(title=title, xlabel="$α_1$", ylabel="$β_1$", xlim=(0, 1), ylim=(0, 1), aspect="equal")


def draw_flow(axes: Axes, flow: Trajectory, *, title: str) -> None:
    """The four coefficients over time; the axis is logarithmic, and time 0 is left out."""
    for (name, (color, style)), values in zip(_LINES.items(), flow.coefficients[1:].T, strict=True):
        axes.semilogx(flow.time[1:], values, color=color, linestyle=style, label=name)
    axes.set(title=title, xlabel="learning rate x steps", ylabel="coefficient")
    axes.grid(alpha=0.25)
