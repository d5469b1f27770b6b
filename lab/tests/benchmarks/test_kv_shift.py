"""The comparison with the formula detects every kind of fault, and the measured implementations pass it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvshift import kv_shift

from .scripts import script

program = script("kv_shift")

SHAPE = (3, 71, 5, 7)
CPU = torch.device("cpu")
OURS = program.Formulation(name="ours", function=program.by_kv_shift())


def worst(formulation, dtype=torch.float32, shape=SHAPE, backward=True):
    k, v, *grads = program.draw(shape, dtype, CPU)[0]
    coefficients = torch.randn(2, shape[2], 2)
    if formulation.fixed:
        coefficients = torch.tensor([1.0, 0.0]).expand_as(coefficients)
    coefficients = coefficients.to(dtype if formulation.rounded else torch.float32)
    leaves = [one.clone().requires_grad_(not formulation.fixed) for one in coefficients]
    return program.worst_error(formulation, [k, v, *leaves], tuple(grads), backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_implementation_agrees_with_the_formula(dtype):
    k = torch.empty(*SHAPE[:3], 6, dtype=dtype)
    found = [*program.without_rotary(k, False), *program.with_rotary(k, False)]
    found = [one for one in found if one.left_out is None]
    assert {"appendix M", "pad, multiply, add", "kv_shift, eager", "kv_shift, then rotary"} <= {x.name for x in found}
    for one in found:
        assert 0 <= worst(one, dtype, tuple(k.shape)) < (1e-6 if dtype == torch.float32 else 0.02), one.name


@pytest.mark.parametrize("what", [{}, {"seq_idx": torch.arange(11) // 4}, {"mask": torch.arange(11) >= 3}], ids=str)
def test_the_formula_is_the_reference(what):
    what = {name: value.expand(2, -1) for name, value in what.items()}
    one = program.Formulation(name="exact", function=OURS.function, boundaries=what)
    x, grad = torch.randn(2, 2, 11, 3, 4).double()
    c = torch.randn(3, 2).double()
    found = program.by_formula(one, x, c, grad, None, True, size=False)
    leaves = x.requires_grad_(), c.requires_grad_()
    y = kv_shift(x, x, c, c, backend="reference", **what)[0]
    exact = [y.detach(), *torch.autograd.grad(y, leaves, grad)]
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)


def test_an_implementation_that_crosses_boundaries_is_found_out():
    for one in program.without_rotary(torch.empty(SHAPE), False):
        if one.boundaries:
            with pytest.raises(ArithmeticError):
                worst(dataclasses.replace(one, function=OURS.function))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_launch_for_shift_and_rotary_embedding_agrees_with_the_formula(dtype):
    """The launches run in Triton's interpreter."""
    pytest.importorskip("triton")
    k = torch.empty(*SHAPE[:3], 6, dtype=dtype)
    unshifted, shifted = (one for one in program.with_rotary(k, False) if "triton" in one.name)
    for one in (unshifted, shifted):
        worst(one, dtype, tuple(k.shape), backward=False)
    with pytest.raises(ArithmeticError):
        worst(dataclasses.replace(shifted, function=unshifted.function), dtype, tuple(k.shape), backward=False)


def broken(change):
    def function(k, v, alpha, beta):
        return change(k, *OURS.function(k, v, alpha, beta), alpha)

    return dataclasses.replace(OURS, function=function)


def last_token_of_the_last_row(k, k_hat, v_hat, alpha):
    off = torch.zeros_like(k_hat)
    off[-1, -1, 0, 0] = 1e-3
    return k_hat + off, v_hat


def crosses_rows(k, k_hat, v_hat, alpha):
    """A fault: the first token of a row is mixed with the last token of the previous row."""
    off = torch.zeros_like(k_hat)
    off[:, 0] = k.roll(1, 0)[:, -1] * alpha[:, 1, None]
    return k_hat + off, v_hat


def no_gradient_of_alpha(k, k_hat, v_hat, alpha):
    return k_hat - alpha[:, 1, None] * k + alpha.detach()[:, 1, None] * k, v_hat


def gradient_where_none_comes_from(k, k_hat, v_hat, alpha):
    middle = k[1, 35]
    return k_hat + (middle - middle.detach()).sum(), v_hat


def not_a_number(k, k_hat, v_hat, alpha):
    return k_hat, v_hat / 0


MUTANTS = (
    last_token_of_the_last_row,
    crosses_rows,
    no_gradient_of_alpha,
    gradient_where_none_comes_from,
    not_a_number,
)


@pytest.mark.parametrize("change", MUTANTS, ids=lambda change: change.__name__)
def test_a_wrong_implementation_is_found_out(change):
    with pytest.raises(ArithmeticError):
        worst(broken(change))


def test_bf16_where_float32_is_asked_for_is_too_coarse():
    def function(k, v, alpha, beta):
        return tuple(y.bfloat16().float() for y in OURS.function(k, v, alpha, beta))

    with pytest.raises(ArithmeticError, match="k_hat: "):
        worst(dataclasses.replace(OURS, function=function))
