"""The numbers of Figure 2."""

import json

import numpy as np
import pytest
import torch

from kvshift_lab.theory.checks import check_field
from kvshift_lab.theory.limit_loss import exact, loss, paper, script
from kvshift_lab.theory.loss_field import FIGURE2, Field, descend_within, figure2_fields, loss_field


def lost(form, alpha1, beta1):
    return loss(torch.tensor([alpha1, 1 - alpha1, beta1, 1 - beta1], dtype=torch.float64), form).item()


@pytest.mark.parametrize("form", [exact(12), paper(10), script(10)])
def test_rows_are_beta_columns_are_alpha(form):
    field = loss_field(form, points=5)
    assert field.alpha1.tolist() == field.beta1.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert field.loss[1, 3] == pytest.approx(lost(form, 0.75, 0.25), rel=1e-14, abs=0)


@pytest.mark.parametrize("form", [exact(12), paper(0), script(10)])
def test_steps_lead_down_by_the_slope_within_the_square(form):
    field = loss_field(form, points=5)
    a, b, h = 0.75, 0.25, 1e-6
    assert field.alpha1_step[1, 3] == pytest.approx(-(lost(form, a + h, b) - lost(form, a - h, b)) / (2 * h), abs=1e-8)
    assert field.beta1_step[1, 3] == pytest.approx(-(lost(form, a, b + h) - lost(form, a, b - h)) / (2 * h), abs=1e-8)


@pytest.mark.parametrize("form", [*map(exact, (4, 5, 8, 12, 32, 102)), *map(paper, (0, 10, 100)), script(0)])
def test_induction_is_the_minimum(form):
    alpha1, beta1, least = loss_field(form, points=41).minimum()
    assert (alpha1, beta1) == (0, 1)
    assert least == pytest.approx(lost(form, 0.0, 1.0), rel=1e-14, abs=0)


def test_only_as_printed_descent_can_be_caught_elsewhere():
    corners = {
        name: [check_field(loss_field(form, points=21))["corner_minima"] for form in panels.values()]
        for name, panels in FIGURE2.items()
    }
    assert corners["exact"] == [[(0, 1)]] * 3
    assert corners["script"] == [[(0, 1)]] * 3
    assert corners["paper"] == [[(0, 1), (1, 0)], [(0, 1), (1, 0)], [(0, 1)]]


@pytest.mark.parametrize("form", [exact(4), exact(12), exact(102), script(0)])
def test_every_start_leads_to_induction(form):
    ends = descend_within(form, points=9)
    assert np.abs(ends - np.array([0.0, 1.0])).max() < 0.02


def test_as_printed_a_third_of_the_starts_end_in_the_other_corner():
    ends = descend_within(paper(0), points=9)
    other = np.abs(ends - np.array([1.0, 0.0])).max(axis=-1) < 0.02
    induction = np.abs(ends - np.array([0.0, 1.0])).max(axis=-1) < 0.02
    assert (other ^ induction).all()
    assert 0.25 < other.mean() < 0.4
    assert other[0, -1]  # rows are beta1, columns alpha1: the start (1, 0)


def test_at_100_no_form_crosses_a_level_of_the_script():
    found = {name: check_field(loss_field(list(panels.values())[2])) for name, panels in FIGURE2.items()}
    assert [field["levels_crossed"] for field in found.values()] == [0, 0, 0]
    assert found["script"]["lowest"] > 99.97  # the levels end at 10
    assert found["script"]["highest"] < 99.995
    assert found["exact"]["highest"] - found["exact"]["lowest"] < 0.017  # the levels are 0.05 apart


def test_figure_2_has_nine_panels():
    fields = figure2_fields(points=3)
    assert {name: list(panels) for name, panels in fields.items()} == {
        "exact": ["T = 4", "T = 12", "T = 102"],
        "paper": ["O(T) = 0", "O(T) = 10", "O(T) = 100"],
        "script": ["O(T) = 0", "O(T) = 10", "O(T) = 100"],
    }
    assert fields["script"]["O(T) = 10"].loss[0, 2] == pytest.approx(lost(script(10), 1.0, 0.0))


def test_fields_survive_a_file():
    field = loss_field(exact(8), points=7)
    again = Field.from_json(json.loads(json.dumps(field.to_json())))
    for name, values in vars(field).items():
        np.testing.assert_array_equal(getattr(again, name), values)
