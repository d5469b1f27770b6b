"""Plots of Figure 2: contour lines of a loss over the square, streamlines of descent, and the flow that leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvshift_lab.analysis.colors import BLUE, GREEN, PURPLE, VERMILLION
from kvshift_lab.analysis.panels import new_figure
from kvshift_lab.theory.gradient_flow import Trajectory
from kvshift_lab.theory.loss_field import LEVELS, Field

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {"$α_1$": (GREEN, "-"), "$α_2$": (GREEN, "--"), "$β_1$": (PURPLE, "-."), "$β_2$": (PURPLE, ":")}


def draw_fields(rows: Mapping[str, Mapping[str, Field]]) -> Figure:
    """Draw a panel for each field (see `draw_field`), given by name of the row and then by title of the panel."""
    fields = {f"{name}, {title}": field for name, panels in rows.items() for title, field in panels.items()}
    figure, panels = new_figure([*fields], columns=3)
    for axes, field in zip(panels, fields.values(), strict=True):
        draw_field(axes, field)
    return figure


def draw_field(axes: Axes, field: Field) -> None:
    """Draw contour lines of the loss at `LEVELS` and streamlines of descent; a dot marks induction.

    If the loss crosses no level, its range is written into the panel: the field is not flat.
    """
    steps = field.alpha1_step, field.beta1_step
    axes.streamplot(field.alpha1, field.beta1, *steps, color=BLUE, linewidth=0.7, density=0.8)
    low, high = float(field.loss.min()), float(field.loss.max())
    crossed = [level for level in LEVELS if low < level < high]
    if crossed:
        axes.contour(field.alpha1, field.beta1, field.loss, levels=crossed, colors="black", linewidths=0.6)
    else:
        text = f"loss {low:.2f} to {high:.2f},\nwithin one contour interval"
        axes.text(0.5, 0.5, text, ha="center", va="center", fontsize="small").set_bbox(
            {"facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        )
    axes.plot(0, 1, "o", color=VERMILLION, markersize=7, clip_on=False, zorder=5)
    axes.grid(False)
    axes.set(xlabel="$α_1$ (keys)", ylabel="$β_1$ (values)", xlim=(0, 1), ylim=(0, 1), aspect="equal")


def draw_flow(axes: Axes, flow: Trajectory) -> None:
    """Draw the four coefficients over time, on a logarithmic axis that leaves out time 0."""
    for (name, (color, style)), values in zip(_LINES.items(), flow.coefficients[1:].T, strict=True):
        axes.semilogx(flow.time[1:], values, color=color, linestyle=style, label=name)
    axes.set(xlabel="learning rate × steps", ylabel="coefficient")
