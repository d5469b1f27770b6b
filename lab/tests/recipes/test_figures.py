"""Every committed figure can be drawn from its records, with one color per variant and axes that can be compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from kvshift_lab.analysis.colors import BLUE, VERMILLION, shades
from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe
from kvshift_lab.study.recipe import without_tuning_runs
from kvshift_lab.study.records import load_records
from kvshift_lab.variants.by_name import VARIANTS

from ..analysis.drawn import colors_by_label

# The streamlines of Figure 2 take seconds.
MARKS = {"fig02": [pytest.mark.slow]}
RESULTS = Path(__file__).parents[3] / "results"
KEPT = [
    pytest.param(name, preset, id=f"{name}-{preset}", marks=MARKS.get(name, []))
    for name, entry in CATALOGUE.items()
    for preset in entry.presets
    if (RESULTS / entry.runs / f"{preset}.jsonl").exists()
]
SHADES = {color: {shade for count in (1, 2, 3, 4) for shade in shades(color, count)} for color in (BLUE, VERMILLION)}
VARIANT_LABELS = {entry.label for entry in VARIANTS.values()} - {"vanilla", "KV-shift"}
SHARED_AXES = (
    "fig05",
    "fig07a",
    "fig07b",
    "fig10",
    "fig11",
    "neighbours",
    *(f"tab{number:02}" for number in range(6, 16)),
)


def test_there_are_figures() -> None:
    assert len(KEPT) >= 35


@pytest.mark.parametrize(("name", "preset"), KEPT)
def test_figure(name: str, preset: str) -> None:
    records = load_records(RESULTS, find_recipe(name), preset)
    if records is None:
        pytest.skip("has not been run to its end")
    figure = find_recipe(name).plot(without_tuning_runs(records))
    FigureCanvasAgg(figure).draw()
    for label, colors in colors_by_label(figure).items():
        variant = label.partition(",")[0]
        expected = {"vanilla": SHADES[BLUE], "KV-shift": SHADES[VERMILLION]}.get(variant)
        assert label in VARIANT_LABELS or expected is None or colors <= expected, label
        assert expected is not None or not colors & {BLUE, VERMILLION}, label
    for axes in figure.axes:
        assert axes.lines or axes.patches or axes.collections, "no panel is empty"
        assert axes.get_title() or axes.get_subplotspec().rowspan.start, "a panel may take the title of the one above"
        assert axes.get_ylabel() or not axes.get_subplotspec().is_first_col()
    if name in SHARED_AXES:
        assert len({axes.get_ylim() for axes in figure.axes}) == 1
