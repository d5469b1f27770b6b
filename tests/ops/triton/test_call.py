"""The Triton kernels run as Python on the CPU: tests beyond those that all backends share."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

from kvshift.ops import ShiftState, dispatch, kv_shift, shift, shift_tokens
from kvshift.ops.triton import call as triton_call
from kvshift.ops.triton import launch as triton_launch
from kvshift.ops.triton.launch import Tiling

from .. import checks
from ..cases import DTYPES, SUMS, assert_same_bits, outcome, random_case
from ..conftest import skip_unless_built
from ..rounding import assert_within_one_rounding
from ..test_compile import Shift

pytestmark = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def kernels_that_run() -> None:
    skip_unless_built("triton")


# Results


@pytest.mark.parametrize(
    "mode", [{"rows": 5}, {"seq_idx": [[0, 0, 1, 1, 1]], "window": 3}], ids=["sequences", "documents"]
)
def test_a_single_tensor_is_shifted_like_keys(mode):
    case = random_case(41, 1, 5, **mode)
    whole = outcome(case, "triton")
    leaves = {"k": case.k.requires_grad_(), "alpha": case.alpha.requires_grad_()}
    if case.state is not None:
        leaves["state.k"] = case.state.k.requires_grad_()
    state = None if case.state is None else case.state.k
    y, rows = shift_tokens(case.k, case.alpha, state=state, seq_idx=case.seq_idx, backend="triton")
    gradients = torch.autograd.grad((y, rows), list(leaves.values()), (case.grads[0], case.grads[2]))
    assert torch.equal(y, whole["k_hat"])
    assert torch.equal(rows, whole["new_state.k"])
    for name, gradient in zip(leaves, gradients, strict=True):
        assert torch.equal(gradient, whole[f"gradient of {name}"]), name


@pytest.mark.parametrize("only", [0, 1, 2, 3])
def test_a_gradient_may_come_back_to_a_single_result(only):
    case = random_case(47, 1, 4, rows=2)
    leaves = [x.requires_grad_() for x in case.leaves().values()]
    results = {}
    for backend in ("triton", "reference"):
        k_hat, v_hat, state = case.call(backend)
        y = (k_hat, v_hat, state.k, state.v)[only]
        given = torch.autograd.grad(y, leaves, case.grads[only], allow_unused=True, materialize_grads=True)
        results[backend] = given
    for gradient, expected in zip(results["triton"], results["reference"], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


# Numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_is_no_larger_than_that_of_plain_pytorch(dtype):
    """Compared with sums in fp64: the mean error, the largest error, and each element's up to one rounding."""
    case = random_case(53, 1, 301, heads=2, k_dim=13, v_dim=3, dtype=dtype)

    def plain(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, **_: object) -> tuple[Tensor, Tensor, ShiftState]:
        shifted_by_hand = []
        for x, coefficients in ((k, alpha), (v, beta)):
            before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
            coefficients = coefficients.to(x.dtype)
            shifted_by_hand.append(coefficients[:, :1] * x + coefficients[:, 1:] * before)
        return *shifted_by_hand, ShiftState(k[:, -1:].clone(), v[:, -1:].clone(), 1)

    exact = outcome(case.map(lambda x: x.double()), "reference")
    own, other = outcome(case, "triton"), outcome(case, "plain", op=plain)
    for name in ("k_hat", "v_hat", "gradient of k", "gradient of v", "gradient of alpha", "gradient of beta"):
        if dtype == torch.float64:
            torch.testing.assert_close(own[name], other[name], rtol=1e-6 if name[-4] == "l" else 1e-12, atol=1e-12)
            continue
        errors = (own[name].double() - exact[name]).abs(), (other[name].double() - exact[name]).abs()
        assert errors[0].square().mean() <= errors[1].square().mean(), name
        assert errors[0].max() <= errors[1].max(), name
    assert_within_one_rounding(case, "triton", through_state=True)


@pytest.mark.parametrize("tiling", [Tiling(positions=1), Tiling(positions=4, heads=2), Tiling(elements=32, heads=8)])
@pytest.mark.parametrize(
    "mode", [{"rows": 2, "window": 3}, {"lengths": [3, 0, 1, 5], "rows": 1}, {"mask": [[1, 0, 1, 1, 0, 1, 1]]}]
)
def test_tiles_change_no_bit_but_the_order_of_the_coefficients_sum(tiling, mode, monkeypatch):
    """Tiles end inside a document, a hole or a group of heads; some programs handle several heads."""
    case = random_case(59, 1, 7, **mode)
    whole = outcome(case, "triton")
    for kernel in ("forward", "backward"):
        monkeypatch.setitem(triton_launch.TILING, kernel, tiling)
    assert_same_bits(outcome(case, "triton"), whole, but=SUMS)
    assert_within_one_rounding(case, "triton", through_state=True)


@pytest.mark.parametrize("dimension", ["batch", "positions", "heads", "head size"])
def test_offsets_beyond_32_bits(dimension, tmp_path):
    """Strides of 2^30 fit into 32 bits, but offsets do not; the tensors are in a sparse file."""
    step = 2**30 + 8
    stride = [64, 16, 4, 1]
    stride[("batch", "positions", "heads", "head size").index(dimension)] = step
    case = random_case(67, 3, 3, heads=3, k_dim=3, v_dim=3, dtype=torch.bfloat16)
    expected = outcome(case, "triton")
    far = []
    for i, x in enumerate((case.k, case.v, *case.grads[:2])):
        memory = torch.from_file(str(tmp_path / str(i)), shared=True, size=2 * step + 256, dtype=x.dtype)
        far.append(memory.as_strided((3, 3, 3, 3), stride).copy_(x))
    k, v, *grads = far
    assert_same_bits(outcome(replace(case, k=k, v=v, grads=(*grads, *case.grads[2:])), "triton"), expected)


@torch.no_grad()
@pytest.mark.parametrize("positions", [0, 1, 2, 9])
@pytest.mark.parametrize(("rows", "max_rows"), [(None, 2), (5, 5), (2, 7)])
def test_a_launch_without_gradients_writes_the_next_state(rows, max_rows, positions, monkeypatch):
    monkeypatch.setitem(triton_launch.TILING, "forward", Tiling(positions=4))
    case = random_case(83, 3, positions, window=3, rows=rows)
    if case.state is not None:
        case = replace(case, state=replace(case.state, max_rows=max_rows))
    checks.assert_same_state(case.call("triton")[2], case.call("reference")[2])


# The operators that PyTorch sees


OPERATORS: dict[str, dict] = {
    "plain": {},
    "state, window 3": {"rows": 3, "window": 3},
    "pack, state": {"lengths": [2, 0, 3], "rows": 1},
    "documents, padding": {"seq_idx": [[0, 0, 1], [1, 1, 1]], "mask": [[0, 1, 1], [1, 0, 1]]},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", OPERATORS.values(), ids=OPERATORS)
def test_operators_keep_the_rules_of_torch_library(mode):
    """Check schema, autograd, shapes of fake tensors, and tracing with symbolic sizes."""
    case = random_case(79, 2, **({"positions": 3} | mode))
    checks.check_operator_keeps_the_rules_of_torch_library(case)


COMPILED = {
    "state, window 3": lambda t: random_case(t, 3, t, heads=5, k_dim=11, v_dim=17, window=3, rows=6),
    "pack": lambda t: random_case(t, lengths=[1, 0, t - 1, 0], heads=5, k_dim=11, v_dim=17),
    "padding, state": lambda t: random_case(
        t, 3, t, heads=5, k_dim=11, v_dim=17, rows=2, mask=[[i % 3 > 0 for i in range(t)]] * 2 + [[True] * t]
    ),
}


@pytest.fixture
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("mode", COMPILED.values(), ids=COMPILED)
@pytest.mark.usefixtures("nothing_compiled_before")
def test_one_compiled_graph_trains_on_any_number_of_tokens(mode):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kv_shift, backend=counter, fullgraph=True, dynamic=True)
    for positions in (7, 2, 13):
        case = mode(positions)
        expected = outcome(case, "triton")
        assert_same_bits(outcome(case, "triton", op=compiled), expected)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    assert "kvshift.shift" in graph.code


def test_an_exported_program_takes_any_number_of_tokens():
    example = random_case(2, 3, 11)
    tokens = {0: Dim("batch", min=2, max=64), 1: Dim("positions", min=2, max=4096)}
    module = Shift(example, "triton")
    program = torch.export.export(module, (example.k, example.v), dynamic_shapes=(tokens, tokens))
    for size in ((2, 2), (5, 17)):
        case = random_case(3, *size)
        results, expected = program.module()(case.k, case.v), module(case.k, case.v)
        assert torch.equal(results[0], expected[0])
        assert torch.equal(results[1], expected[1])
        checks.assert_same_state(results[2], expected[2])


# The choice of a backend


def test_the_widest_window():
    assert_within_one_rounding(random_case(83, 1, 9, window=8, rows=7), "triton", through_state=True)


def test_without_triton_it_is_named_and_auto_takes_another(monkeypatch):
    case = random_case(101, 1, 3)
    monkeypatch.setattr(triton_call, "_HAS_TRITON", False)
    with pytest.raises(ValueError, match=r'backend "triton" cannot be used here: Triton is not installed'):
        case.call("triton")
    assert torch.equal(case.call("auto")[0], case.call("eager")[0])


def test_the_environment_chooses_what_auto_is(monkeypatch):
    case = random_case(103, 1, 3)
    launches = itertools.count()
    real = triton_launch.kernels()
    monkeypatch.setattr(triton_launch, "kernels", lambda: (next(launches), real)[1])
    monkeypatch.setattr(dispatch, "_AUTO", "triton")
    case.call("eager")
    assert next(launches) == 0, "a backend that is named is taken"
    case.call("auto")
    assert next(launches) > 1
    monkeypatch.setattr(dispatch, "_AUTO", "tritron")
    with pytest.raises(ValueError, match=r"the environment variable KVSHIFT_BACKEND must be one of .*; got 'tritron'"):
        case.call("auto")


@pytest.mark.slow
def test_the_environment_is_read_when_a_process_begins():
    program = "from kvshift.ops.dispatch import choose_backend as c; print(c('auto'), c('cpu'))"
    source = str(Path(shift.__file__).parents[2])
    env = os.environ | {"KVSHIFT_BACKEND": "reference", "PYTHONPATH": source}
    printed = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == ["reference", "cpu"]
