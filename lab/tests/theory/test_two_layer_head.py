"""Theorem 3.2 and its bounds."""

import math

import pytest
import torch

from kvshift_lab.core.seeds import generator_for
from kvshift_lab.theory.checks import check_two_layers
from kvshift_lab.theory.two_layer_head import (
    copy_bound,
    error_bound,
    previous_tokens,
)


@pytest.fixture(scope="module")
def found():
    return check_two_layers(draws=32)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_the_bounds_hold(found, p):
    row = found["slopes"][p]
    assert row["copy"] <= 1
    assert row["sharp"] <= 1
    assert row["printed"] < row["derived"] < row["sharp"]
    assert row["radius"] <= 1


def test_without_a_limit_on_the_tokens_no_bound_holds(found):
    assert found["slopes"][8]["unbounded"] > 10


def test_the_error_falls_as_exp_of_minus_p(found):
    assert found["decay_low"] == pytest.approx(-1, abs=5e-4)
    assert found["decay_high"] == pytest.approx(-1, abs=5e-4)


def test_a_first_layer_that_sees_the_token_itself_copies_nothing(found):
    rows = found["slopes"]
    assert rows[8]["error"] < 0.01 * rows[1]["error"]
    assert rows[8]["error_causal"] > 0.9 * rows[1]["error_causal"] > 0.5


def test_the_layers_are_the_construction(found):
    assert found["layer"] < 1e-12


def test_previous_tokens_worked_by_hand():
    x = torch.tensor([[[1.0], [10.0], [100.0]]], dtype=torch.float64)
    e = math.exp(-2)
    strict = previous_tokens(x, 2.0).flatten().tolist()
    assert strict == pytest.approx([0, 1, (10 + 1 * e) / (1 + e)], rel=1e-14, abs=0)
    causal = previous_tokens(x, 2.0, strict=False).flatten().tolist()
    assert causal == pytest.approx([1, (10 + e) / (1 + e), (100 + 10 * e + e * e) / (1 + e + e * e)], rel=1e-14, abs=0)


@pytest.mark.parametrize("p", [0.1, 1.0, 5.0])
def test_the_copy_bound_is_reached_and_rises_to_its_supremum(p):
    # x_{s-1} = 1 among tokens that are all -1, and y_s differs from it by 2 (1 - 1 / Z_s).
    x = torch.full((1, 9, 1), -1.0, dtype=torch.float64)
    x[0, 7] = 1
    assert 1 - previous_tokens(x, p)[0, 8].item() == pytest.approx(copy_bound(p, 9), rel=1e-12)
    bounds = [copy_bound(p, length) for length in (2, 3, 9, 400)]
    assert bounds[0] == 0
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(copy_bound(p), rel=1e-12)


def test_softmax_moves_no_more_than_its_argument():
    generator = generator_for("test softmax", 0)
    u, v = (torch.randn(500, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    moved = (u.softmax(1) - v.softmax(1)).abs().sum(1)
    assert (moved <= (u - v).abs().amax(1)).all()
    # Two equal entries that are moved apart a little show that the factor 1 cannot be smaller.
    tiny = torch.tensor([1e-3, -1e-3], dtype=torch.float64)
    assert (tiny.softmax(0) - 0.5).abs().sum().item() / 1e-3 == pytest.approx(1, abs=1e-6)


def test_bounds_worked_by_hand():
    assert error_bound(6, 3.0, math.log(2)) == pytest.approx(4 * 2 / 2)
    assert error_bound(6, 3.0, math.log(2), form="printed") == pytest.approx(4 * 2 * 1)
    assert error_bound(6, 3.0, math.log(2), form="sharp", radius=3) == pytest.approx(27 * 2 * 2 / 2)
