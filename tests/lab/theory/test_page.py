"""docs/theory.md and results/theory/checks.json say what the code says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvshift.lab.theory.checks import check_figure2, check_flow, check_places

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def recorded():
    return json.loads((ROOT / "results/theory/checks.json").read_text())


@pytest.fixture(scope="module")
def page():
    return " ".join((ROOT / "docs/theory.md").read_text().split())


def test_what_needs_no_draws_is_as_recorded(recorded):
    figure = json.loads(json.dumps(check_figure2()))
    for now, then in zip(figure, recorded["figure2"], strict=True):
        assert {name: value for name, value in now.items() if not isinstance(value, float)} == {
            name: value for name, value in then.items() if not isinstance(value, float)
        }
        for name in ("lowest", "highest"):
            assert now[name] == pytest.approx(then[name], rel=1e-12)
    for row in recorded["places"]:
        assert check_places(8, row["coefficients"]) == pytest.approx(row["loss"], rel=1e-12)


def test_the_page_quotes_the_draws(page, recorded):
    for row in recorded["monte_carlo"]:
        mix = ", ".join(f"{value:g}" for value in row["coefficients"])
        closed = " | ".join(f"{row[name]:.5f}" for name in ("exact", "table3", "script"))
        assert f"| {mix} | {row['mean']:.5f} ± {row['stderr']:.5f} | {closed} |" in page
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


def test_the_page_quotes_the_flow(page, recorded):
    (now,) = check_flow((8,))
    assert now["coefficients"] == pytest.approx(recorded["flow"][0]["coefficients"], abs=1e-4)
    for row in recorded["flow"]:
        coefficients = " | ".join(f"{value:.2f}" for value in row["coefficients"])
        assert f"| {row['tokens']} | {coefficients} | {row['loss']:.1e} |".replace("e-04", "e-4") in page


def test_the_command_prints_what_it_writes(tmp_path):
    file = tmp_path / "new" / "checks.json"
    command = [sys.executable, "-m", "kvshift.lab.theory", "--draws", "8", "--monte-carlo-draws", "2"]
    command += ["--width", "16", "--steps", "3", "--out", str(file)]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(printed["monte_carlo"]) == 4
    assert json.loads(file.read_text()) == printed
