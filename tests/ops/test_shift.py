"""Every backend gives the exact result with one rounding: forward, and the gradient of every input."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvshift.ops import ShiftState, torch_ops

from ..covering import covering
from .cases import DTYPES, LAYOUTS, SUMS, Case, assert_same_bits, outcome, random_case
from .conftest import skip_unless_built
from .rounding import assert_within_one_rounding
from .strategies import cases

MODES: dict[str, dict] = {
    "plain": {},
    "state": {"rows": 4},
    "window 3": {"window": 3},
    "window 4, state": {"window": 4, "rows": 5},
    "pack": {"lengths": [3, 0, 1, 7]},
    "pack, state": {"lengths": [0, 3, 1, 7, 0], "rows": 2},
    "pack, state, padding": {"lengths": [2, 0, 3], "rows": 2, "mask": [[0, 1, 1, 0, 1]]},
    "documents": {"seq_idx": [[0, 0, 1, 2, 2, 2, 5], [3, 3, 3, 3, 3, 3, 3]], "positions": 7},
    "documents, state, padding": {
        "seq_idx": [[0, 0, 0, 1, 2], [4, 4, 4, 3, 3]],
        "mask": [[0, 1, 1, 1, 0], [1, 0, 1, 1, 1]],
        "positions": 5,
        "rows": 3,
    },
    "padding": {"mask": [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], "positions": 5},
    "padding, state, window 3": {
        "mask": [[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]],
        "positions": 5,
        "rows": 3,
        "window": 3,
    },
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@covering(mode=MODES, dtype=DTYPES, through_state={"outputs": False, "outputs and state": True})
def test_results_and_gradients_are_exact_but_for_one_rounding(mode, dtype, through_state, backend):
    assert_within_one_rounding(random_case(2, dtype=dtype, **mode), backend, through_state=through_state)


@dtypes
@pytest.mark.parametrize("coefficient_dtype", DTYPES, ids=str)
def test_coefficients_may_have_a_dtype_of_their_own(dtype, coefficient_dtype, fast_backend):
    for window in (2, 3):
        case = random_case(3, 1, 5, dtype=dtype, coefficient_dtype=coefficient_dtype, rows=2, window=window)
        assert_within_one_rounding(case, fast_backend, through_state=True)


@covering(
    layout=LAYOUTS,
    grad_layout=[*LAYOUTS, "expanded"],
    mode={"sequences": MODES["state"], "pack": MODES["pack, state"]},
    block={"many": 100, "one block": 2**19},
)
def test_strides_change_no_bit_but_the_order_of_the_coefficients_sum(
    layout, grad_layout, mode, block, monkeypatch, fast_backend
):
    case = random_case(5, layout=layout, grad_layout=grad_layout, **mode)
    expected = outcome(case.map(lambda x: x.clone(memory_format=torch.contiguous_format)), fast_backend)
    monkeypatch.setattr(torch_ops, "_BLOCK", block)
    assert_same_bits(outcome(case, fast_backend), expected, but=SUMS)
    assert_within_one_rounding(case, fast_backend, through_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@given(case=cases())
def test_search_for_a_call_that_differs_from_the_reference(case, backend):
    """Blocks of "eager" have few positions, in larger calls one to three, so their borders fall everywhere."""
    skip_unless_built(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "_BLOCK", 32)
        assert_within_one_rounding(case, backend, through_state=True)


@pytest.mark.slow
@settings(max_examples=40)  # the interpreter takes a quarter of a second for each
@given(case=cases())
def test_search_for_a_call_whose_kernels_differ_from_the_reference(case):
    skip_unless_built("triton")
    assert_within_one_rounding(case, "triton", through_state=True)


@covering(mode=MODES, dtype=DTYPES, block=[1, 50, 100])
def test_blocks_change_no_bit_but_the_order_of_the_coefficients_sum(mode, dtype, block, monkeypatch):
    case = random_case(7, dtype=dtype, **mode)
    whole = outcome(case, "eager")
    monkeypatch.setattr(torch_ops, "_BLOCK", block)
    assert_same_bits(outcome(case, "eager"), whole, but=SUMS)
    assert_within_one_rounding(case, "eager", through_state=True)


@pytest.mark.slow
@modes
def test_gradcheck_of_the_reference(mode):
    """Compare its derivatives with finite differences in fp64; the tests above compare all others with them."""
    shape = {"positions": 5, "heads": 2, "k_dim": 2, "v_dim": 1} | mode
    case = random_case(11, dtype=torch.float64, coefficient_dtype=torch.float64, **shape)

    def results(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        state = ShiftState(*rows, case.state.max_rows) if rows else None
        call = Case(k, v, alpha, beta, state, case.cu_seqlens, case.seq_idx, case.mask)
        k_hat, v_hat, new_state = call.call("reference")
        return k_hat, v_hat, new_state.k, new_state.v

    inputs = [x.requires_grad_() for x in case.leaves().values()]
    assert torch.autograd.gradcheck(results, inputs)


@pytest.mark.parametrize("trained", ["k", "v", "alpha", "beta", "state.k", "state.v"])
def test_a_single_input_may_need_its_gradient_alone(trained, fast_backend):
    """For example, only the coefficients need gradients if the rest of a model is frozen."""
    case = random_case(13, rows=1)
    leaves = case.leaves()
    expected = outcome(case, fast_backend)[f"gradient of {trained}"]
    leaves[trained].requires_grad_()
    k_hat, v_hat, new_state = case.call(fast_backend)
    results = (k_hat, v_hat, new_state.k, new_state.v)
    pairs = [(y, g) for y, g in zip(results, case.grads, strict=True) if y.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    assert torch.equal(leaves[trained].grad, expected)
    assert all(x.grad is None for name, x in leaves.items() if name != trained)


def test_coefficients_of_a_long_sequence_keep_their_precision(fast_backend):
    """A running sum in fp32 would be off by 1e-4 here; a tree of sums is not. The interpreter gets fewer positions."""
    interpreted = fast_backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    positions = 2_003 if interpreted else 100_003
    x = torch.full((1, positions, 1, 3), 0.1)
    coefficients = torch.tensor([[1.0, 0.0]], requires_grad=True)
    k_hat, _, _ = Case(x, x, coefficients, coefficients.detach()).call(fast_backend)
    (gradient,) = torch.autograd.grad(k_hat, coefficients, x)
    square = float(x[0, 0, 0, 0].double()) ** 2
    exact = torch.tensor([[3 * positions * square, 3 * (positions - 1) * square]])
    torch.testing.assert_close(gradient, exact, rtol=1e-6, atol=0)


def test_what_lies_between_may_exceed_the_dtype():
    """Products that exceed fp16 cancel in the fp32 sum; a result that exceeds fp16 is infinite."""
    k = torch.tensor([60000.0, 60000.0, 30000.0], dtype=torch.float16).reshape(1, 3, 1, 1)
    coefficients = torch.tensor([[1.5, -1.0]])
    k_hat, v_hat, _ = Case(k, k, coefficients, coefficients.neg()).call("eager")
    assert k_hat.flatten().tolist() == [torch.inf, 30000.0, -15000.0]
    assert v_hat.flatten().tolist() == [-torch.inf, -30000.0, 15000.0]


@dtypes
def test_the_smallest_numbers_survive(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    k = torch.tensor([smallest, 3 * smallest], dtype=dtype).reshape(1, 2, 1, 1)
    assert k.count_nonzero() == 2
    coefficients = torch.tensor([[1.0, 1.0]])
    k_hat, v_hat, _ = Case(k, -k, coefficients, coefficients).call("eager")
    assert torch.equal(k_hat.flatten(), torch.tensor([smallest, 4 * smallest], dtype=dtype))
    assert torch.equal(v_hat, -k_hat)


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_and_matmul_precision_change_no_bit(mode, dtype):
    """The operator computes in fp32 whatever precision a model allows for its matrix products, backward too."""
    case = random_case(19, dtype=dtype, **mode)
    expected = outcome(case, "eager")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            results = outcome(case, "eager")
    finally:
        torch.set_float32_matmul_precision(before)
    for name, result in results.items():
        assert torch.equal(result, expected[name]), name
        assert result.dtype == expected[name].dtype, name
