"""Common layout of all figures: a fixed width, for equal font sizes on a page; panels in rows; one legend below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

LOSS = "validation loss\n(nats per token)"
INTERVALS = "means over seeds; bands and bars are 95 % intervals"
TWO_SEEDS = "means over two seeds; thin lines are the seeds"

_WIDTH = 9.0  # width of all figures, in inches


def new_figure(
    titles: Sequence[str],
    *,
    ylabels: Sequence[str] = (),
    height: float = 3.0,
    columns: int | None = None,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Create a figure with a panel for each title, two or three per row, with faint grids.

    Args:
        titles: Titles of the panels; long ones are wrapped.
        ylabels: One label per panel, or a single one for all, which is written at the left of each row.
        height: Height of a row of panels, in inches.
        columns: Panels per row. None: 2 for 4 panels, otherwise up to 3.
        sharey: Share the vertical axis among all panels.
    """
    from matplotlib.figure import Figure

    columns = columns or (2 if len(titles) == 4 else min(3, len(titles)))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(_WIDTH, height * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=sharey).ravel().tolist()
    for unused in grid[len(titles) :]:
        unused.remove()
    panels = grid[: len(titles)]
    for number, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        axes.set_title(textwrap.fill(title, int(10 * _WIDTH / columns)), fontsize="medium")
        if len(ylabels) > 1 or (ylabels and number % columns == 0):
            axes.set_ylabel(ylabels[number if len(ylabels) > 1 else 0])
        axes.grid(alpha=0.25)
    return figure, panels


def legend_below(figure: Figure, note: str | None = None) -> None:
    """Draw one legend for all panels below them, with each label once and the note as its title."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    inches = 0.6 + 0.09 * max(map(len, entries), default=0)  # approximate width of an entry
    columns = max(1, min(len(entries), int(figure.get_figwidth() / inches)))
    figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", ncols=columns, frameon=False, title=note
    )


def integer_ticks(axis: Axis) -> None:
    """Place ticks only at whole numbers, for an axis of counts."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def count_steps(axes: Axes) -> None:
    """Label the x-axis as training steps, with ticks at whole numbers."""
    axes.set_xlabel("step")
    integer_ticks(axes.xaxis)
