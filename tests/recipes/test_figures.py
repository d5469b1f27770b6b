"""The committed figures: one color for each variant, no curve behind a legend, no first evaluation cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshift.lab.analysis.colors import BLUE, VERMILLION
from kvshift.recipes.catalogue import CATALOGUE, find_recipe
from kvshift.recipes.recipe import reported
from kvshift.recipes.records import read_records

from ..lab.analysis.drawn import colors_by_label, first_points_cut_off, hidden_by_legends, ticks_between_whole_numbers

pytestmark = pytest.mark.no_models

RESULTS = Path(__file__).parents[2] / "results"
KEPT = sorted(
    path
    for name, entry in CATALOGUE.items()
    for preset in entry.presets
    if (path := RESULTS / name / f"{preset}.jsonl").exists()
)
NO_STEPS = ("fig02", "fig03", "tab03", "depth")  # from left to right


def test_there_are_figures() -> None:
    assert len(KEPT) >= 9


# The streamlines of Figure 2 take five seconds.
@pytest.mark.parametrize(
    "path", [path for path in KEPT if path.parent.name != "fig02"], ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_figure(path: Path) -> None:
    name = path.parent.name
    figure = find_recipe(name).plot(reported(read_records(path)))
    assert not hidden_by_legends(figure)
    assert not first_points_cut_off(figure)
    for label, colors in colors_by_label(figure).items():
        variant = label.partition(",")[0]
        expected = {"vanilla": {BLUE}, "KV-shift": {VERMILLION}}.get(variant)
        assert expected is None or colors == expected, label
        assert expected is not None or not colors & {BLUE, VERMILLION}, label
    steps = [axes.xaxis for axes in figure.axes if axes.get_xlabel() in ("step", "k")]
    assert steps or name in NO_STEPS
    assert not [axis for axis in steps if ticks_between_whole_numbers(axis)]
