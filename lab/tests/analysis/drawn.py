"""Checks that apply to any figure, as matplotlib's Agg renderer draws it."""

from __future__ import annotations

from collections import defaultdict

from matplotlib.backends.backend_agg import FigureCanvasAgg


def hidden_by_legends(figure):
    """Return the panels that a legend overlaps; a legend below the panels overlaps none."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    assert legends, "there is a legend"
    boxes = [legend.get_window_extent(renderer) for legend in legends]
    page = figure.bbox
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 for box in boxes), "it is on the page"
    return [axes for axes in figure.axes if any(axes.get_window_extent(renderer).overlaps(box) for box in boxes)]


def colors_by_label(figure):
    """Return the colors that are drawn under each label."""
    found = defaultdict(set)
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            line = handle[0] if isinstance(handle, tuple) else handle  # an error bar has the color of its dot
            found[label].add(line.get_color() if hasattr(line, "get_color") else line.get_facecolor())
    return dict(found)


def first_points_cut_off(figure):
    """Return the labels of curves whose first point lies outside their panel, except for dotted curves."""
    cut = []
    for axes in figure.axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for line in axes.lines:
            if line.get_transform() != axes.transData or not len(line.get_xdata()) or line.get_linestyle() == ":":
                continue
            x, y = line.get_xydata()[0]
            if not (left <= x <= right and low <= y <= high):
                cut.append(line.get_label())
    return cut


def ticks_between_whole_numbers(axis):
    """Return the major ticks within the axis that are not whole numbers."""
    low, high = axis.get_view_interval()
    return [tick for tick in axis.get_majorticklocs() if low <= tick <= high and tick != round(tick)]
