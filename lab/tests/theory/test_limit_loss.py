"""Theorem 3.4 and Table 3 in closed form."""

import math
from dataclasses import replace

import pytest
import torch

from kvshift_lab.theory.limit_loss import exact, loss, paper, script, token_logits

SETTINGS = [(0.3, 0.7, 0.2, 0.8), (2.0, -1.0, -1.0, 3.0), (3.0, 0.0, 0.0, 4.0)]
INDUCTION = torch.tensor([0, 1, 1, 0], dtype=torch.float64)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def logits_by_loops(tokens, repeated, a1, a2, b1, b2):
    """Return the logits of tokens 1 .. T, where <u_j, u_k> = 1 if j = k and 0 otherwise."""
    row = [*range(1, tokens + 1), repeated]
    scores = [a1 * (x == repeated) + a2 * (before == repeated) for before, x in zip([0, *row], row, strict=False)]
    total = sum(math.exp(score) for score in scores)
    logits = dict.fromkeys(range(tokens + 1), 0.0)
    for before, x, score in zip([0, *row], row, scores, strict=False):
        logits[x] += math.exp(score) / total * b1
        logits[before] += math.exp(score) / total * b2
    return [logits[token] for token in range(1, tokens + 1)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("tokens", [4, 5, 11])
def test_the_derived_logits_are_those_of_a_count_by_hand(tokens, setting):
    found = token_logits(tensor(setting), exact(tokens))
    for i in range(2, tokens - 1):
        kinds = {i + 1: found.target, i: found.repeated, i - 1: found.side, tokens: found.side}
        expected = [kinds.get(token, found.other).item() for token in range(1, tokens + 1)]
        assert logits_by_loops(tokens, i, *setting) == pytest.approx(expected, abs=1e-14)


def test_equal_logits_cost_the_logarithm_of_their_number():
    nothing = tensor([0.0] * 4)
    assert loss(nothing, exact(11)).item() == pytest.approx(math.log(11), rel=1e-14, abs=0)
    assert loss(nothing, paper(10)).item() == pytest.approx(math.log(14), rel=1e-14, abs=0)


@pytest.mark.parametrize("constant", [0, 3, 10, 100])
def test_script_is_the_formula_of_appendix_l(constant):
    for alpha, beta in [(0.0, 1.0), (0.25, 0.5), (0.9, 0.1)]:
        total = 2 * math.exp(alpha) + math.exp(1 - alpha) + constant
        a1, a2 = math.exp(alpha) / total, math.exp(1 - alpha) / total
        target = a2 * beta + (1 - beta) / total
        side = beta / total + (1 - beta) * a2
        repeated = 2 * a1 * beta + a2 + (1 - beta)
        below = math.exp(target) + 2 * math.exp(side) + math.exp(repeated) + math.exp(constant)
        expected = -math.log(math.exp(target) / below)
        assert loss(tensor([alpha, 1 - alpha, beta, 1 - beta]), script(constant)).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ((0.0, 1.0, 1.0, 0.0), (1.95252, 1.95252, 1.99012)),
        ((0.3, 0.7, 0.2, 0.8), (2.08343, 2.09610, 2.24751)),
        ((2.0, -1.0, -1.0, 3.0), (2.31745, 1.96281, 2.92632)),
        ((3.0, 0.0, 0.0, 4.0), (2.77821, 2.07944, 4.19455)),
    ],
)
def test_losses_known_to_five_places(setting, values):
    forms = (exact(8), replace(exact(8), side="A2"), replace(exact(8), repeated="sum"))
    assert [loss(tensor(setting), form).item() for form in forms] == pytest.approx(list(values), abs=5e-6)


@pytest.mark.parametrize(
    ("form", "value"),
    [
        *((exact(t), v) for t, v in [(4, 1.23758), (5, 1.46149), (8, 1.95252), (12, 2.38421), (32, 3.41874)]),
        (exact(102), 4.60882),
        *((paper(c), v) for c, v in [(0, 1.17814), (10, 2.48870), (100, 4.61906)]),
    ],
)
def test_loss_of_induction_known_to_five_places(form, value):
    assert loss(INDUCTION, form).item() == pytest.approx(value, abs=5e-6)


def test_shapes_follow_the_coefficients():
    many = tensor(SETTINGS).expand(5, 3, 4)
    found = loss(many, exact(8))
    assert found.shape == (5, 3)
    torch.testing.assert_close(found[2, 1], loss(tensor(SETTINGS[1]), exact(8)), rtol=0, atol=1e-15)
