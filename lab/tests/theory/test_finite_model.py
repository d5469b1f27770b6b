"""The finite model, whose limit is the subject of Theorem 3.4."""

import math

import pytest
import torch

from kvshift_lab.core.seeds import generator_for
from kvshift_lab.theory.checks import COEFFICIENTS, check_logits, check_monte_carlo, check_orthonormal, check_positions
from kvshift_lab.theory.finite_model import build_layer, draw_losses, random_embeddings
from kvshift_lab.theory.limit_loss import exact, loss


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("tokens", [4, 5, 8, 11])
def test_with_orthonormal_embeddings_layer_and_operator_meet_the_derivation_and_not_the_print(tokens, coefficients):
    found = check_orthonormal(tokens, coefficients)
    assert found["exact"] < 1e-12
    assert found["printed"] > 1e-3


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("tokens", [4, 5, 8])
def test_table_3_errs_at_the_sides_alone(tokens, coefficients):
    found = check_logits(tokens, coefficients)
    assert set(found) == {"target", "repeated", "side"} | ({"other"} if tokens > 4 else set())
    for kind, row in found.items():
        assert row["spread"] < 1e-15
        assert row["model"] == pytest.approx(row["derived"], abs=1e-15)
        if kind != "side":
            assert row["printed"] == row["derived"]
    a1, a2, _, b2 = coefficients
    slip = (math.exp(a2) - math.exp(a1)) * b2 / (2 * math.exp(a1) + math.exp(a2) + tokens - 2)
    assert found["side"]["printed"] - found["side"]["model"] == pytest.approx(slip, abs=1e-15)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_the_closed_form_holds_for_i_up_to_t_minus_2(coefficients):
    tokens = 8
    a1, a2, b1, b2 = coefficients
    losses = check_positions(tokens, coefficients)
    inner = loss(torch.tensor(coefficients, dtype=torch.float64), exact(tokens)).item()
    assert losses[1:-1] == pytest.approx([inner] * 5, abs=1e-12)
    total = 2 * math.exp(a1) + math.exp(a2) + tokens - 2
    big1, big2 = math.exp(a1) / total, math.exp(a2) / total
    repeated, side, other = 2 * big1 * b1 + big2 * b2, b1 / total + big1 * b2, (b1 + b2) / total
    for place, target in ((0, big2 * b1 + b2 / total), (-1, big2 * b1 + big1 * b2)):
        below = math.exp(target) + math.exp(repeated) + math.exp(side) + (tokens - 3) * math.exp(other)
        assert losses[place] == pytest.approx(math.log(below) - target, abs=1e-12)


@pytest.fixture(scope="module")
def wide():
    return check_monte_carlo(draws=100, width=1024)


def test_gaussian_embeddings_agree_with_the_derivation(wide):
    assert all(abs(row["mean"] - row["exact"]) < 4 * row["stderr"] for row in wide)


def test_gaussian_embeddings_reject_table_3_and_the_script(wide):
    for row in wide:
        assert abs(row["mean"] - row["script"]) > 5 * row["stderr"]
        if row["coefficients"][3] != 0:  # with b2 = 0, the error in print is multiplied by 0
            assert abs(row["mean"] - row["table3"]) > 5 * row["stderr"]


def test_the_spread_falls_as_one_over_the_root_of_the_width(wide):
    narrow = check_monte_carlo(draws=100, width=64)
    ratios = [small["stderr"] / large["stderr"] for small, large in zip(narrow, wide, strict=True)]
    assert ratios == pytest.approx([4] * 4, rel=0.25)


def test_narrow_embeddings_are_not_in_the_limit():
    row = check_monte_carlo(draws=2000, width=8)[2]
    assert abs(row["mean"] - row["exact"]) > 5 * row["stderr"]


def test_draws_are_fresh_and_repeatable():
    options = {"tokens": 5, "repeated": 3, "width": 2**17, "draws": 3}  # a batch holds no more than one draw
    losses = draw_losses(COEFFICIENTS[1], **options, generator=generator_for("test draws", 0))
    assert len(set(losses)) == 3
    assert losses == draw_losses(COEFFICIENTS[1], **options, generator=generator_for("test draws", 0))


def test_embeddings_have_unit_length_on_average():
    norms = random_embeddings(64, 5, 512, generator_for("test embeddings", 0)).square().sum(2)
    assert norms.mean().item() == pytest.approx(1, abs=4 * math.sqrt(2 / 512 / norms.numel()))


def test_only_the_coefficients_of_the_layer_learn():
    layer = build_layer(7)
    assert {name for name, parameter in layer.named_parameters() if parameter.requires_grad} == {
        "shift.alpha",
        "shift.beta",
    }
