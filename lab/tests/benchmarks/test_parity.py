"""The parity check detects every kind of fault in an implementation, and the measured ones pass it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvshift_lab.benchmarks import formulations
from kvshift_lab.benchmarks.formulations import (
    Formulation,
    formulations_with_rotary,
    formulations_without_rotary,
    fused_formulations,
    rotary_tables,
)
from kvshift_lab.benchmarks.parity import check_formulation

SHAPE = (3, 71, 5, 7)
CPU = torch.device("cpu")
OURS = Formulation(name="ours", function=formulations.kv_shift_function("auto"))


def check(formulation, dtype=torch.float32, shape=SHAPE, **options):
    return check_formulation(formulation, shape, dtype, CPU, backward=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_formulation_agrees_with_the_reference(dtype):
    k = torch.empty(SHAPE, dtype=dtype)
    found = [one for one in formulations_without_rotary(k, compiled=False) if one.left_out is None]
    assert {"appendix M", "pad, multiply, add", "kv_shift", "kv_shift, eager"} <= {part.name for part in found}
    for formulation in found:
        assert check(formulation, dtype).problem is None, formulation.name


def test_a_path_that_crosses_boundaries_is_found_out():
    found = formulations_without_rotary(torch.empty(SHAPE), compiled=False)
    for formulation in (part for part in found if part.boundaries):
        assert check(dataclasses.replace(formulation, function=OURS.function)).problem is not None, formulation.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_formulation_with_a_rotary_embedding_agrees_with_the_reference(dtype):
    shape = (3, 71, 5, 6)
    table = rotary_tables(shape[1], shape[3], dtype, CPU)
    for formulation in [one for one in formulations_with_rotary(table, compiled=False) if one.left_out is None]:
        assert check(formulation, dtype, shape, table=table).problem is None, formulation.name


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_launch_for_shift_and_rotary_embedding_agrees_with_the_reference(dtype):
    """The launches run in Triton's interpreter."""
    pytest.importorskip("triton")
    shape = (3, 71, 5, 6)
    table = rotary_tables(shape[1], shape[3], dtype, CPU)
    unshifted, shifted = fused_formulations(table)
    for formulation in (unshifted, shifted):
        assert check(formulation, dtype, shape, table=table).problem is None, formulation.name
    pretender = dataclasses.replace(shifted, function=unshifted.function)
    assert check_formulation(pretender, shape, dtype, CPU, backward=False, table=table).problem is not None


def test_short_sequences_and_single_tokens_are_checked_too():
    for shape in ((1, 1, 2, 3), (1, 40, 2, 3), (2, 1, 2, 3)):
        assert check(OURS, shape=shape).problem is None, shape


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
def test_a_wrong_path_is_named(change):
    assert check(broken(change)).problem is not None


def test_bf16_where_float32_is_asked_for_is_too_coarse():
    def function(k, v, alpha, beta):
        return tuple(y.bfloat16().float() for y in OURS.function(k, v, alpha, beta))

    problem = check(dataclasses.replace(OURS, function=function)).problem
    assert problem is not None
    assert problem.startswith("k_hat")
