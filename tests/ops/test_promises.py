"""Exactness, determinism and memory use of the operator, which never modifies its inputs."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvshift.ops import ShiftState, kv_shift, torch_ops

from .cases import DTYPES, SUMS, assert_same_bits, outcome, random_case
from .checks import LENGTHS, check_identity_returns_every_bit, check_inputs_are_left_alone
from .conftest import leave_to_one_dtype
from .rounding import assert_within_one_rounding

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MODES: dict[str, dict] = {
    "plain": {},
    "window 4": {"window": 4},
    "state": {"rows": 3},
    "one token": {"positions": 1, "rows": 1},
    "pack": {"lengths": LENGTHS, "rows": 2},
    "documents": {"seq_idx": [[0, 0, 1, 1, 1]] * 2, "positions": 5},
    "padding": {"mask": [[0, 1, 1, 0, 1], [1, 1, 1, 1, 0]], "positions": 5, "rows": 2},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def with_infinities(x: Tensor) -> Tensor:
    """Replace every third number by a zero or an infinity of either sign."""
    odd = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf], dtype=x.dtype)
    index = torch.arange(x.numel())
    return torch.where(index % 3 == 1, odd[index % 4], x.flatten()).reshape(x.shape)


@dtypes
@modes
def test_identity_coefficients_return_keys_and_values_bit_for_bit(dtype, mode, backend):
    """There is no 0 * infinity, and no 0 * 3 that turns -0.0 into 0.0, neither forward nor in the gradients."""
    case = random_case(2, dtype=dtype, **mode).map(with_infinities)
    check_identity_returns_every_bit(case, backend)
    if backend == "reference":  # autograd, which computes its gradients, multiplies infinite ones by zero
        return
    identity = torch.eye(1, case.window, dtype=case.alpha.dtype).expand_as(case.alpha)
    results = outcome(replace(case, alpha=identity, beta=identity), backend, through_state=False)
    real = slice(None) if case.mask is None else case.mask
    assert torch.equal(results["gradient of k"][real], case.grads[0][real])
    assert torch.equal(results["gradient of v"][real], case.grads[1][real])


def test_a_lag_whose_coefficient_is_zero_is_not_read(backend):
    """Holds for each head separately, and for any lag."""
    nan, inf = torch.nan, torch.inf
    k = torch.tensor([[3.0, 3.0], [inf, -0.0], [5.0, 7.0], [nan, inf], [2.0, 4.0]]).reshape(1, 5, 2, 1)
    coefficients = torch.tensor([[0.0, 1.0], [1.0, -0.0]])
    for positions in (5, 1):
        start = ShiftState(k[:, 4 - positions :][:, :1], k[:, 4 - positions :][:, :1], 1) if positions == 1 else None
        k_hat, v_hat, _ = kv_shift(
            k[:, -positions:], k[:, -positions:], coefficients, coefficients.flip(0), state=start, backend=backend
        )
        before, now = torch.tensor([0.0, 3.0, inf, 5.0, nan]), torch.tensor([3.0, -0.0, 7.0, inf, 4.0])
        torch.testing.assert_close(k_hat[0, :, 0, 0], before[-positions:], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(k_hat[0, :, 1, 0].view(torch.int32), now[-positions:].view(torch.int32))
        torch.testing.assert_close(v_hat[0, :, 0, 0], k[0, -positions:, 0, 0], rtol=0, atol=0, equal_nan=True)


@modes
def test_a_coefficient_of_zero_has_its_gradient(mode, backend):
    """A coefficient of zero can be learned: a retrofitted model starts at the identity."""
    case = random_case(23, **mode)
    case.alpha[:, 1] = 0
    case.alpha[1] = 0
    case.beta[0, 0] = 0
    assert_within_one_rounding(case, backend, through_state=False)
    assert outcome(case, backend)["gradient of alpha"].all()


@dtypes
@modes
def test_callers_tensors_are_theirs(dtype, mode, backend):
    leave_to_one_dtype(backend, dtype)
    check_inputs_are_left_alone(random_case(3, dtype=dtype, **mode), backend)


@pytest.mark.parametrize("positions", [0, 1, 2, 3])
def test_a_state_shares_no_memory_with_what_it_was_made_from(positions, backend):
    """Holds for fewer tokens than rows of state, for as many, and for more."""
    case = random_case(5, positions=positions, rows=2)
    check_inputs_are_left_alone(case, backend)
    _, _, state = case.call(backend)
    given = {x.untyped_storage().data_ptr() for x in (case.k, case.v, case.state.k, case.state.v) if x.numel()}
    for x in (state.k, state.v):
        assert x.untyped_storage().data_ptr() not in given
        assert x.untyped_storage().nbytes() < 2 * x.nbytes, "a state keeps little more than its rows"


@modes
def test_memory_kept_for_backward_is_the_inputs_and_the_plan(mode, fast_backend):
    """Backward saves k and v and nothing else of their sizes; with boundaries, also a few integers per token."""
    case = random_case(11, **mode)
    inputs = case.leaves()
    addresses = {x.requires_grad_().data_ptr(): name for name, x in inputs.items()}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        k_hat, v_hat, _ = case.call(fast_backend)
    tokens = case.k.shape[0] * case.k.shape[1]
    names = []
    for x in kept:
        if x.dtype == torch.float32 and x.data_ptr() in addresses:
            names.append(addresses[x.data_ptr()])
        elif x.dtype == torch.float32:  # zeros before the first token
            assert x.numel() < tokens * 3 * 5
            assert not x.any()
        else:  # the plan and the rows of the next state: W and R integers for each token or sequence
            assert x.dtype in (torch.int32, torch.int64, torch.bool)
            assert x.numel() <= (tokens + 3 * len(LENGTHS)) * case.window
    assert sorted(names) == sorted(inputs)
    assert k_hat.grad_fn is not None
    assert v_hat.grad_fn is not None


def test_without_gradients_nothing_is_kept(fast_backend):
    case = random_case(13)
    case.alpha.requires_grad_()
    kept: list[Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        k_hat, _, _ = case.call(fast_backend)
    assert not kept
    assert not k_hat.requires_grad


@pytest.mark.parametrize(
    "shape", [{"batch": 3, "positions": 149}, {"lengths": [301, 1, 0, 139]}], ids=["sequences", "pack"]
)
def test_the_same_bits_on_every_run(shape, monkeypatch, fast_backend):
    """Gradients of the coefficients sum over all tokens in a fixed order, also with two threads in each block."""
    if fast_backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter runs one program after the other")
    monkeypatch.setattr(torch_ops, "_BLOCK", 2**17)
    case = random_case(17, heads=5, k_dim=67, v_dim=61, rows=1, **shape)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = outcome(case, fast_backend, through_state=False)
        for _ in range(3):
            assert_same_bits(outcome(case, fast_backend, through_state=False), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("identity", [False, True], ids=["random", "identity"])
@modes
def test_second_derivatives_are_those_of_the_reference(mode, identity, fast_backend):
    """Requested for one input at a time: autograd then skips all nodes off its path, even those that would raise."""
    case = random_case(19, dtype=torch.float64, coefficient_dtype=torch.float64, **mode)
    if identity:
        one = torch.eye(1, case.window, dtype=torch.float64).expand_as(case.alpha)
        case = replace(case, alpha=one.clone(), beta=one.clone())
    inputs = case.leaves()
    for tensor in inputs.values():
        tensor.requires_grad_()

    def of(backend: str, name: str) -> Tensor:
        k_hat, v_hat, state = case.call(backend)
        loss = sum(x.pow(3).sum() for x in (k_hat, v_hat, state.k, state.v))
        first = torch.autograd.grad(loss, list(inputs.values()), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs[name])[0]

    for name in inputs:
        torch.testing.assert_close(of(fast_backend, name), of("reference", name), rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("missing", ["alpha", "beta"])
@modes
def test_a_tensor_without_coefficients_has_its_state_kept_all_the_same(missing, mode, backend):
    case = random_case(23, **mode)
    *both, state = case.call(backend)
    *results, new_state = replace(case, **{missing: None}).call(backend)
    passed, shifted = (0, 1) if missing == "alpha" else (1, 0)
    assert results[passed] is (case.k, case.v)[passed]
    assert torch.equal(results[shifted], both[shifted])
    assert torch.equal(new_state.k, state.k)
    assert torch.equal(new_state.v, state.v)


NOTHING: tuple[dict, ...] = (
    *({"batch": b, "positions": t, "rows": 2} for b, t in ((0, 5), (2, 0), (0, 0))),
    *({"batch": b, "positions": t, "rows": 1, "mask": [[True] * t] * b} for b, t in ((0, 5), (2, 0), (0, 0))),
    {"batch": 2, "positions": 0},
    *({"lengths": lengths, "rows": 1} for lengths in ([], [0], [0, 0, 0])),
)


@pytest.mark.parametrize("mode", NOTHING, ids=str)
def test_nothing_passes_its_state_on(mode, backend):
    case = random_case(29, **mode)
    k_hat, v_hat, state = case.call(backend)
    assert (k_hat.shape, v_hat.shape) == (case.k.shape, case.v.shape)
    if case.state is not None:
        assert state == case.state
    assert not any(outcome(case, backend)[name].any() for name in SUMS)
    assert_within_one_rounding(case, backend, through_state=True)
