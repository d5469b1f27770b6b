"""What all figures share: a legend that hides no curve, and axes whose ticks are whole numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["count_steps", "legend_below", "whole_ticks"]


def legend_below(figure: Figure) -> None:
    """One legend for all panels, below them, with each label once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    inches = 0.6 + 0.09 * max(map(len, entries), default=0)  # of one entry, about
    columns = max(1, min(len(entries), int(figure.get_figwidth() / inches)))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns, frameon=False)


def whole_ticks(axis: Axis) -> None:
    """Ticks at whole numbers alone, for what is counted."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def count_steps(axes: Axes) -> None:
    """Steps of training from left to right."""
    axes.set_xlabel("step")
    whole_ticks(axes.xaxis)
