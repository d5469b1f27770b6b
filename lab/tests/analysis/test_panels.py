"""Colors that all figures share."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_accuracy, draw_shares
from kvshift_lab.analysis.colors import BLUE, VERMILLION, colors_of, shades
from kvshift_lab.analysis.curves import plot_curves, plot_learning

from .drawn import colors_by_label
from .run_folders import write_pair, write_run


def test_a_variant_has_one_color_whatever_stands_beside_it_and_in_whatever_order():
    assert colors_of(["KV-shift", "vanilla"]) == colors_of(["vanilla", "KV-shift"])
    assert colors_of(["KV-shift"])["KV-shift"] == colors_of(["V-shift", "KV-shift"])["KV-shift"] == VERMILLION
    assert colors_of(["vanilla"]) == {"vanilla": BLUE}


def test_variants_without_a_color_of_their_own_are_given_different_ones():
    names = ["smear", "vanilla", "latent", "KV-shift", "selective"]
    found = colors_of(names)
    assert len(set(found.values())) == 5
    assert found == colors_of(names[::-1])


@pytest.mark.parametrize("order", [1, -1])
def test_accuracies_and_shares_have_the_same_colors_in_any_order(order):
    curves = {"vanilla, 1 layer": (0.1, 0.2), "vanilla, 2 layers": (0.1, 0.9), "KV-shift, 1 layer": (0.1, 1.0)}
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    chosen = dict(list(curves.items())[::order])
    draw_accuracy(left, {label: {0: ((1, 2), values)} for label, values in chosen.items()}, chance=0.5)
    draw_shares(right, ["all"], {name: [[{"share": 0.5, "stderr": 0.1}]] for name in ("vanilla", "KV-shift")[::order]})
    found = colors_by_label(figure)
    assert found["KV-shift, 1 layer"] == found["KV-shift"] == {VERMILLION}
    assert found["vanilla, 1 layer"] == found["vanilla"] == {BLUE}
    assert found["vanilla, 2 layers"] == {shades(BLUE, 2)[1]} != {BLUE}, "paler"
    styles = {line.get_label(): line.get_linestyle() for line in left.lines if line.get_label() in curves}
    assert styles["vanilla, 1 layer"] == styles["KV-shift, 1 layer"] != styles["vanilla, 2 layers"]


def test_a_comparison_has_the_colors_of_its_variants(tmp_path):
    figure = plot_curves(write_pair(tmp_path, gain=0.1))
    assert colors_by_label(figure)["vanilla"] == {BLUE}
    assert colors_by_label(figure)["KV-shift"] == {VERMILLION}


def test_the_curve_of_one_run_has_the_color_of_its_variant(tmp_path):
    metrics = write_run(tmp_path / "run", steps=20) / "metrics.jsonl"
    figure = plot_learning(metrics, "KV-shift")
    assert set.union(*colors_by_label(figure).values()) == {VERMILLION}
    assert colors_by_label(plot_learning(metrics))["validation loss"] == {BLUE}
