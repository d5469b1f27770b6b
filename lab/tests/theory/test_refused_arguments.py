"""Heads, models and losses refuse impossible arguments with a message that names the argument and its range."""

import pytest
import torch

from kvshift_lab.theory import finite_model, one_layer_head, two_layer_head
from kvshift_lab.theory.gradient_flow import gradient_flow, take_steps
from kvshift_lab.theory.induction_head import induction_head, softmax_between
from kvshift_lab.theory.limit_loss import Form, exact, loss, paper
from kvshift_lab.theory.loss_field import loss_field

ONES, PAIR = torch.ones(2, 7, 5), torch.ones(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: induction_head(torch.ones(2, 2, 5), 1.0, 1.0), r"length >= 3, got \(2, 2, 5\)"),
        (lambda: induction_head(torch.ones(7, 5), 1.0, 1.0), r"x must be \(batch, length, width\)"),
        (lambda: induction_head(ONES, 0.0, 1.0), "sigma must be above 0, got 0"),
        (lambda: induction_head(ONES, 1.0, -1.0), "slope must be above 0, got -1"),
        (lambda: softmax_between(torch.zeros(1, 5), 0, 3), "1 <= first <= last <= 5, got 0 and 3"),
        (lambda: softmax_between(torch.zeros(1, 5), 4, 3), "1 <= first <= last <= 5, got 4 and 3"),
        (lambda: softmax_between(torch.zeros(1, 5), 2, 6), "1 <= first <= last <= 5, got 2 and 6"),
        (lambda: one_layer_head.build_layer(5, 0.0), r"sigma must be above 0, got 0\.0"),
        (lambda: one_layer_head.build_layer(5, 1.0, heads=3, head=3), "head must be from 0 to 2, got 3"),
        (lambda: two_layer_head.error_bound(6, 3.0, 1.0, form="loose"), 'form must be "derived", "printed" or "sharp"'),
        (lambda: two_layer_head.two_layer_head(ONES, 1.0, 0.0, 1.0), "first_slope must be above 0, got 0"),
        (lambda: two_layer_head.build_layers(3, -1.0), "sigma must be above 0, got -1"),
        (lambda: two_layer_head.build_layers(3, 1.0, heads=2, first_head=2), "first_head must be from 0 to 1, got 2"),
        (lambda: two_layer_head.build_layers(3, 1.0, heads=2, head=-1), "head must be from 0 to 1, got -1"),
        (lambda: finite_model.model_loss(ONES, 0, PAIR, PAIR), "repeated must be from 1 to 6, so that it has a succ"),
        (lambda: finite_model.model_loss(ONES, 7, PAIR, PAIR), "repeated must be from 1 to 6"),
        (lambda: finite_model.model_loss(ONES[0], 2, PAIR, PAIR), r"must be \(batch, tokens, width\), got \(7, 5\)"),
        (lambda: exact(3), "tokens must be at least 4"),
        (lambda: paper(-1), "others must be at least 0 with rest='constant', got -1"),
        (lambda: Form(others=1), "others must be at least 2 with rest='tokens', got 1"),
        (lambda: Form(others=2, side="A3"), "side must be one of A1, A2; got 'A3'"),
        (lambda: Form(others=2, repeated="mean"), "repeated must be one of product, sum; got 'mean'"),
        (lambda: Form(others=2, rest="none"), "rest must be one of tokens, constant, exponential; got 'none'"),
        (lambda: loss(torch.zeros(3), exact(4)), r"coefficients must be \(\.\.\., 4\): a1, a2, b1, b2; got \(3,\)"),
        (lambda: loss_field(exact(8), points=1), "^points must be at least 2, got 1"),
        (lambda: gradient_flow(exact(8), time=0.0), "time must be above 0, got 0"),
        (lambda: gradient_flow(exact(8), points=1), "points must be at least 2, got 1"),
        (lambda: take_steps(exact(8), steps=0), "steps must be at least 1, got 0"),
        (lambda: take_steps(exact(8), learning_rate=-1.0, steps=1), "learning_rate must be above 0, got -1"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
