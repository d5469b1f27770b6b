"""docs/theory.md and results/theory/checks.json agree with the code."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from kvshift_lab.theory.__main__ import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def recorded():
    return json.loads((ROOT / "results/theory/checks.json").read_text())


@pytest.fixture(scope="module")
def page():
    return " ".join((ROOT / "docs/theory.md").read_text().split())


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """The results that the command writes and prints, with few draws."""
    file = tmp_path_factory.mktemp("theory") / "new" / "checks.json"
    options = ["--draws", "8", "--monte-carlo-draws", "2", "--width", "16", "--steps", "3", "--out", str(file)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(options)
    assert json.loads(file.read_text()) == json.loads(printed.getvalue())
    return json.loads(printed.getvalue())


@pytest.mark.slow
def test_the_command_computes_what_is_recorded(computed, recorded):
    assert computed.keys() == recorded.keys()
    assert len(computed["monte_carlo"]) == len(recorded["monte_carlo"])


@pytest.mark.slow
def test_what_needs_no_draws_is_as_recorded(computed, recorded):
    for now, then in zip(computed["figure2"], recorded["figure2"], strict=True):
        assert {name: value for name, value in now.items() if not isinstance(value, float)} == {
            name: value for name, value in then.items() if not isinstance(value, float)
        }
        for name in ("lowest", "highest"):
            assert now[name] == pytest.approx(then[name], rel=1e-12)
    for now, then in zip(computed["places"], recorded["places"], strict=True):
        assert now["coefficients"] == then["coefficients"]
        assert now["loss"] == pytest.approx(then["loss"], rel=1e-12)


def test_the_page_quotes_the_draws(page, recorded):
    for row in recorded["monte_carlo"]:
        coefficients = ", ".join(f"{value:g}" for value in row["coefficients"])
        closed = " | ".join(f"{row[name]:.5f}" for name in ("exact", "table3", "script"))
        assert f"| {coefficients} | {row['mean']:.5f} ± {row['stderr']:.5f} | {closed} |" in page
    slopes = recorded["two_layers"]["slopes"].values()
    for name in ("copy", "printed", "derived", "sharp"):
        assert " | ".join(f"{row[name]:.3f}" for row in slopes) in page
    assert " | ".join(f"{row['unbounded']:.0f}" for row in slopes) in page
    one = recorded["one_layer"]
    for name in ("masked", "relation", "layer"):
        assert f"| {one[name]:.1e} |" in page
    assert f"| {one['causal']:.2f} |" in page
    assert f"off by up to {one['printed']:.1f}" in page


def test_the_page_quotes_the_figure(page, recorded):
    for row in recorded["figure2"]:
        corners = ", ".join(f"({a}, {b})" for a, b in row["corner_minima"])
        shares = f"{100 * row['share_away']:.1f} % | {100 * row['share_caught']:.1f} %"
        numbers = f"{row['lowest']:.5f} | {row['highest']:.5f} | {row['levels_crossed']} | {shares}"
        assert f"| {row['form']} | {row['panel']} | {numbers} | {corners} |" in page


@pytest.mark.slow
def test_the_page_quotes_the_flow(page, recorded, computed):
    for row, now in zip(recorded["flow"], computed["flow"], strict=True):
        assert now["coefficients"] == pytest.approx(row["coefficients"], abs=1e-4)
        coefficients = " | ".join(f"{value:.2f}" for value in row["coefficients"])
        assert f"| {row['tokens']} | {coefficients} | {row['loss']:.1e} |".replace("e-04", "e-4") in page
