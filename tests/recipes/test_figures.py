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
FORMULAS = ("fig02", "tab03")  # nothing is compared there that has the color of a variant


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "fig02"])  # its streamlines take five seconds
def test_figure(name: str) -> None:
    [path] = (RESULTS / name).glob("*.jsonl")
    figure = find_recipe(name).plot(reported(read_records(path)))
    assert not hidden_by_legends(figure)
    assert not first_points_cut_off(figure)
    for label, colors in colors_by_label(figure).items():
        variant = label.partition(",")[0]
        expected = {"vanilla": {BLUE}, "KV-shift": {VERMILLION}}.get(variant)
        assert expected is None or colors == expected, label
        assert expected is not None or not colors & {BLUE, VERMILLION}, label
    steps = [axes.xaxis for axes in figure.axes if axes.get_xlabel() in ("step", "k")]
    assert steps or name in FORMULAS
    assert not [axis for axis in steps if ticks_between_whole_numbers(axis)]
