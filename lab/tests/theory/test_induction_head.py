"""Definition 3.1 of the induction head."""

import math

import pytest
import torch

from kvshift_lab.core.seeds import generator_for
from kvshift_lab.theory.induction_head import induction_head, random_tokens, softmax_between


def test_worked_by_hand():
    # The scores are 1 * 1 / 1 - 2 ln 2 for s = 2 and 1 * 2 / 1 - ln 2 for s = 3, so the weights are 1 to 2e.
    x = torch.tensor([[[1.0], [2.0], [3.0], [1.0]]], dtype=torch.float64)
    expected = (2 + 3 * 2 * math.e) / (1 + 2 * math.e)
    assert induction_head(x, 1.0, math.log(2)).item() == pytest.approx(expected, rel=1e-14, abs=0)


def test_three_tokens_leave_no_choice():
    x = random_tokens(5, 3, 7, generator_for("test head", 0))
    torch.testing.assert_close(induction_head(x, 0.7, 0.3), x[:, 1], rtol=0, atol=0)


@pytest.mark.parametrize("slope", [1e-6, 0.25, 3.0])
def test_matches_share_by_how_near_they_stand(slope):
    # In A B . A C . A with orthonormal tokens, C follows a match that is 3 tokens nearer than B's.
    a, b, c, other = torch.eye(4, dtype=torch.float64)
    x = torch.stack([a, b, other, a, c, other, a]).unsqueeze(0)
    out = induction_head(x, 0.01, slope)[0]
    assert (out[2] / out[1]).item() == pytest.approx(math.exp(3 * slope), rel=1e-12)
    assert out[[0, 3]].abs().max() < 1e-30


def test_the_last_token_has_no_say_as_a_value():
    x = random_tokens(2, 11, 3, generator_for("test head", 1)).requires_grad_()
    weight_of_last = torch.autograd.functional.jacobian(lambda y: induction_head(y, 1.0, 0.1), x.detach())
    # x_{L-1} is never a key: it reaches the output only as a value, by w_{L-1} I.
    near = weight_of_last[0, :, 0, -2]
    torch.testing.assert_close(near, near[0, 0] * torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-15)


def test_weights_outside_are_zero():
    weights = softmax_between(torch.zeros(1, 5), 2, 4)
    torch.testing.assert_close(weights, torch.tensor([[0, 1, 1, 1, 0]]) / 3)
