"""The colors of a figure."""

from __future__ import annotations

from collections import defaultdict


def colors_by_label(figure):
    """Return the colors that are drawn under each label."""
    found = defaultdict(set)
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            line = handle[0] if isinstance(handle, tuple) else handle  # an error bar has the color of its dot
            found[label].add(line.get_color() if hasattr(line, "get_color") else line.get_facecolor())
    return dict(found)
