"""The Triton kernels run as Python on the CPU: tests beyond those that all backends share."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.export import Dim

from kvshift.ops import ShiftState, dispatch, kv_shift, shift, shift_tokens
from kvshift.ops.arguments import TENSORS, Call
from kvshift.ops.shift import with_plan
from kvshift.ops.triton import call as triton_call
from kvshift.ops.triton import launch as triton_launch
from kvshift.ops.triton.launch import Tiling

from ..cases import SUMS, Case, assert_same_bits, outcome, random_case
from ..conftest import skip_unless_built
from ..rounding import assert_within_one_rounding
from ..test_compile import MODES as COMPILED
from ..test_compile import Shift
from ..test_torch_ops import MODES as OPERATORS

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


# Numbers


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


@pytest.mark.parametrize("step", [2**30 + 8, 2**30 + 1])
@pytest.mark.parametrize("dimension", ["batch", "positions", "heads", "head size"])
def test_offsets_beyond_32_bits(dimension, step, tmp_path):
    """Strides of 2^30 fit into 32 bits, but offsets do not, unless 8 divides them; the tensors are in a sparse file."""
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
    assert case.call("triton")[2] == case.call("reference")[2]


@pytest.mark.parametrize("shifted", ["alpha", "beta", "both"])
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("positions", [1, 5])
def test_the_next_state_of_a_launch_is_differentiable_twice(positions, rows, shifted):
    case = random_case(89, 2, positions, rows=rows, dtype=torch.float64)
    x = case.leaves()
    for leaf in x.values():
        leaf.requires_grad_()
    coefficients = [x[name] if shifted in (name, "both") else None for name in ("alpha", "beta")]
    leaves = [leaf for name, leaf in x.items() if name not in ("alpha", "beta") or shifted in (name, "both")]

    def derivatives(backend: str) -> list[Tensor]:
        k, v, state = kv_shift(x["k"], x["v"], *coefficients, state=case.state, backend=backend)
        upstream = [y.detach().requires_grad_() for y in case.grads]
        results, options = (k, v, state.k, state.v), {"materialize_grads": True}
        alone = torch.autograd.grad(results, leaves, upstream, retain_graph=True, **options)
        first = torch.autograd.grad(results, leaves, upstream, create_graph=True, **options)
        seconds = [y for y in first if y.requires_grad]
        return [*alone, *first, *torch.autograd.grad(seconds, upstream, seconds, **options)]

    for found, expected in zip(derivatives("triton"), derivatives("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained", ["alpha", "k", "v"])
def test_a_state_needs_gradients_only_of_what_it_holds(trained):
    case = random_case(97, 2, 5)
    case.leaves()[trained].requires_grad_()
    for backend in ("triton", "eager"):
        _, _, state = case.call(backend)
        assert (state.k.requires_grad, state.v.requires_grad) == (trained == "k", trained == "v"), backend


# The operators that PyTorch sees


def check_operator_keeps_the_rules_of_torch_library(case: Case) -> None:
    """Check schema, autograd, fake tensors and symbolic tracing for calls with gradients and with a next state."""
    state = case.state or ShiftState(None, None, 1)
    for x in case.leaves().values():
        x.requires_grad_()
    given = with_plan(Call(None, case.k, case.v, case.alpha, case.beta, state.k, state.v, **case.where()))
    torch.library.opcheck(torch.ops.kvshift.shift.default, (*given[:TENSORS], 0.0, 0))
    with torch.no_grad():
        rows = 2 if given.next_state is None else given.next_state.shape[1]
        torch.library.opcheck(torch.ops.kvshift.shift.default, (*given[:TENSORS], 0.0, rows))


@pytest.mark.parametrize("positions", [0, 3])
def test_gradients_of_coefficients_and_gains_have_the_dtype_that_a_compiler_is_told(positions):
    """They are float32 beside tokens in bfloat16; a compiler that was told otherwise would read other numbers."""
    tokens = [torch.ones(2, positions, 2, 4, dtype=torch.bfloat16) for _ in range(6)]
    coefficients, tables, gains = torch.ones(2, 2, 2), torch.ones(2, 1, positions, 2), torch.ones(2, 4)
    call = Call(*tokens[3:], *coefficients, None, None, *tables, *gains)
    given = (*tokens[:3], *call[:TENSORS], 1e-6)
    found = torch.ops.kvshift.shift_backward(*given)
    with FakeTensorMode() as mode:
        told = torch.ops.kvshift.shift_backward(*(mode.from_tensor(x) if torch.is_tensor(x) else x for x in given))
    assert [(x.dtype, x.shape, x.stride()) for x in found] == [(x.dtype, x.shape, x.stride()) for x in told]
    assert [x.dtype for x in found] == [torch.bfloat16] * 3 + [torch.float32] * 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", OPERATORS.values(), ids=OPERATORS)
def test_operators_keep_the_rules_of_torch_library(mode):
    check_operator_keeps_the_rules_of_torch_library(random_case(79, **({"batch": 2, "positions": 3} | mode)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["state, window 3", "pack, state", "padding, state"])
@pytest.mark.usefixtures("nothing_compiled_before")
def test_one_compiled_graph_trains_on_any_number_of_tokens(mode):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kv_shift, backend=counter, fullgraph=True, dynamic=True)
    for positions in (7, 2, 13):
        case = COMPILED[mode](positions)
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
        assert results[2] == expected[2]


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


def test_auto_uses_the_kernels_on_a_gpu_where_they_can_take_the_call(monkeypatch):
    """The CPU stands for a GPU. With rotary embedding, a compiled program uses them for training only."""
    monkeypatch.setattr(dispatch, "is_gpu", lambda x: True)
    k, tables = torch.zeros(1, 5, 3, 8), torch.ones(1, 5, 1, 4)

    def paths(window: int = 2, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
        x = k.to(dtype)
        call = Call(x, x, x, torch.ones(3, window), torch.ones(3, window))
        return dispatch.shift_path(call._replace(q=None)), dispatch.fused_path(call._replace(cos=tables, sin=tables))

    assert paths() == paths(dtype=torch.bfloat16) == paths(window=8) == ("triton", "launch")
    assert paths(window=9) == paths(dtype=torch.complex64) == ("eager", "unfused")
    compiled = torch.compile(paths, backend="eager", fullgraph=True)
    assert compiled() == ("eager", "launch")
    with torch.no_grad():
        assert compiled() == ("eager", "unfused")
    monkeypatch.undo()
    assert paths()[1] == "unfused"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "auto cpu"), ({"KVSHIFT_BACKEND": "reference"}, "reference cpu")],
)
def test_the_environment_is_read_when_a_process_begins(variables, expected):
    program = "from kvshift.ops import dispatch as d; print(d.choose_backend('auto'), d.choose_backend('cpu'))"
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVSHIFT_")}
    env |= {"PYTHONPATH": str(Path(shift.__file__).parents[2]), **variables}
    printed = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == expected
