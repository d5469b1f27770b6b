"""PyTorch's own checks of operators, on `kv_shift`: derivatives, tensor subclasses, tracing, registration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.testing import assert_close
from torch.testing._internal import composite_compliance as compliance
from torch.testing._internal.optests import aot_autograd_check, make_fx_check

from kvshift.ops import ShiftState, kv_shift
from kvshift.ops.arguments import TENSORS, Call
from kvshift.ops.shift import with_plan

from ..ops.cases import random_case

CALLS: dict[str, dict[str, Any]] = {
    "rows": {},
    "window of 4": {"window": 4},
    "state": {"window": 3, "rows": 2},
    "padding": {"mask": [[0, 1, 1, 0, 1], [1, 1, 1, 1, 0]], "window": 3, "rows": 3},
    "pack": {"lengths": (2, 0, 1, 3)},
    "pack with state": {"lengths": (2, 0, 1, 3), "window": 3, "rows": 2},
    "documents": {"seq_idx": [[0, 0, 1, 1, 1], [4, 5, 5, 6, 6]]},
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
backends = pytest.mark.parametrize("backend", ["cpu", "eager"])


Function = Callable[..., tuple[Tensor, ...]]


def function(call: dict[str, Any], backend: str) -> tuple[Function, tuple[Tensor, ...], dict[str, Tensor]]:
    """Return `kv_shift` as a function of tensors to tensors, its arguments in double, and its boundaries."""
    sizes = {"positions": 5, "heads": 2, "k_dim": 2, "v_dim": 1, "dtype": torch.float64}
    case = random_case(5, **sizes, coefficient_dtype=torch.float64, **call)

    def shift(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, *state: Tensor, **where: Tensor) -> tuple[Tensor, ...]:
        before = ShiftState(*state, max_rows=case.state.max_rows) if state else None
        k_hat, v_hat, after = kv_shift(k, v, alpha, beta, state=before, **where, backend=backend)
        return k_hat, v_hat, after.k, after.v

    where = {name: x for name, x in case.where().items() if x is not None}
    return shift, tuple(x.requires_grad_() for x in case.leaves().values()), where


def within(call: dict[str, Any], backend: str) -> tuple[Function, tuple[Tensor, ...]]:
    """Return that function with its boundaries, and its arguments."""
    shift, inputs, where = function(call, backend)
    return partial(shift, **where), inputs


@calls
@backends
def test_first_derivatives(call, backend):
    shift, inputs = within(call, backend)
    assert gradcheck(shift, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)


@calls
@backends
def test_second_derivatives(call, backend):
    shift, inputs = within(call, backend)
    assert gradgradcheck(shift, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


@calls
def test_keys_and_values_may_be_tensor_subclasses(call):
    shift, (k, v, *others) = within(call, "auto")
    compliance.check_all_permutations(lambda k, v: shift(k, v, *others), (k, v), {}, assert_close)


@calls
@backends
def test_gradients_may_be_tensor_subclasses(call, backend):
    shift, inputs = within(call, backend)
    plain = {"inputs": inputs}  # inside a dictionary they are not wrapped
    compliance.check_backward_formula(lambda x: shift(*x["inputs"]), (plain,), {}, assert_equal_fn=assert_close)


@calls
@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_tracing(call, tracing):
    shift, inputs, where = function(call, "auto")
    make_fx_check(shift, inputs, where, tracing)


@calls
@pytest.mark.parametrize("dynamic", [False, True])
def test_joint_graphs_of_forward_and_backward(call, dynamic):
    shift, inputs, where = function(call, "auto")
    aot_autograd_check(shift, inputs, where, dynamic)


@calls
def test_the_registered_operator(call):
    case = random_case(5, positions=5, **call)
    state = case.state or ShiftState(None, None, 1)
    for x in case.leaves().values():
        x.requires_grad_()
    given = with_plan(Call(None, case.k, case.v, case.alpha, case.beta, state.k, state.v, **case.where()))
    opcheck(torch.ops.kvshift.shift.default, (*given[:TENSORS], 0.0, 0))
