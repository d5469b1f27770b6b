"""What all figures share: one width, so that letters have one size on a page; panels in rows; one legend below."""

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

_WIDTH = 9.0  # inches, of all figures


def new_figure(
    titles: Sequence[str],
    *,
    ylabels: Sequence[str] = (),
    height: float = 3.0,
    columns: int | None = None,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, two or three in a row, and faint grids.

    Args:
        titles: of the panels; they are broken where a line is full.
        ylabels: one for each panel, or one for all, which stands at the left.
        height: of a row of panels, in inches.
        columns: panels in a row; None: 2 of 4, and up to 3 of any other number.
        sharey: all panels have one vertical axis.
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
    """One legend for all panels, below them, with each label once, and above it a note."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    inches = 0.6 + 0.09 * max(map(len, entries), default=0)  # of one entry, about
    columns = max(1, min(len(entries), int(figure.get_figwidth() / inches)))
    figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", ncols=columns, frameon=False, title=note
    )


def whole_ticks(axis: Axis) -> None:
    """Ticks at whole numbers alone, for what is counted."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def count_steps(axes: Axes) -> None:
    """Steps of training from left to right."""
    axes.set_xlabel("step")
    whole_ticks(axes.xaxis)
