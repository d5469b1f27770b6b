"""`torch.compile` and `torch.export`: one graph without breaks, for any number of tokens, with the same results."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.fx import GraphModule

from kvshift.ops import ShiftState, kv_shift

from .cases import Case, outcome, random_case
from .rounding import assert_within_one_rounding

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled_before"),
    # torch.compile instantiates every autograd function that it traces.
    pytest.mark.filterwarnings(r"ignore:<class 'torch\.autograd\.function\.Function'>:DeprecationWarning"),
]

# All sizes differ, since a compiler treats equal sizes as the same number.
POSITIONS = (7, 2, 13, 31)
SIZES: dict[str, int] = {"heads": 5, "k_dim": 11, "v_dim": 17}
MODES: dict[str, Callable[[int], Case]] = {
    "plain": lambda t: random_case(t, 3, t, **SIZES),
    "state, window 3": lambda t: random_case(t, 3, t, **SIZES, window=3, rows=6),
    "pack, state": lambda t: random_case(t, lengths=[1, 0, t - 1, 0], **SIZES, rows=2),
    "documents, state": lambda t: random_case(
        t, 3, t, **SIZES, rows=2, seq_idx=[sorted([0, 1] * t)[:t], [4] * t, list(range(t))]
    ),
    "padding, state": lambda t: random_case(
        t, 3, t, **SIZES, rows=2, mask=[[0] + [1] * (t - 1), [1, 0] + [1] * (t - 2), [1] + [0] * (t - 1)]
    ),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.slow
def test_one_compiled_graph_trains_on_any_number_of_tokens(mode):
    """Tested forward and backward, also with fewer tokens than rows of state."""
    counter = CompileCounterWithBackend("aot_eager")

    def checked(graph: GraphModule, inputs: list[Tensor]) -> Callable:
        assert_no_output_is_a_tensor_that_was_there_before(graph)
        return counter(graph, inputs)

    compiled = torch.compile(kv_shift, backend=checked, fullgraph=True, dynamic=True)
    for positions in POSITIONS:
        assert_within_one_rounding(mode(positions), "auto", through_state=True, op=compiled)
    assert counter.frame_count == 1


def assert_no_output_is_a_tensor_that_was_there_before(graph: GraphModule) -> None:
    """torch.compile of 2.11 computes wrong gradients if an output was written in place or cast to its own dtype."""
    forwards = {name: body for name, body in graph.named_modules() if name.startswith("fwd_body")}
    assert len(forwards) == 2
    for node in (node for body in forwards.values() for node in body.graph.nodes if node.op == "call_method"):
        in_place = node.target.endswith("_") and not node.target.endswith("__")
        if in_place or node.target == "to":
            assert node.args[0].meta["example_value"].dtype != node.meta["example_value"].dtype, node.format_node()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["state, window 3", "padding, state"])
def test_one_compiled_graph_infers_from_any_number_of_tokens(mode):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kv_shift, backend=counter, fullgraph=True, dynamic=True)
    for positions in POSITIONS:
        case = MODES[mode](positions)
        results, expected = case.call("auto", compiled), case.call("eager")
        torch.testing.assert_close(results[:2], expected[:2], rtol=1e-6, atol=1e-6)
        assert results[2] == expected[2]
    assert counter.frame_count == 1


def test_compiled_decoding_is_compiled_once():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kv_shift, backend=counter, fullgraph=True, dynamic=False)
    case = random_case(2, 2, 7, rows=1)
    k_hat, v_hat, new_state = case.call("eager")
    state = case.state
    for t in range(7):
        token = replace(case, k=case.k[:, t : t + 1].clone(), v=case.v[:, t : t + 1].clone(), state=state)
        k_t, v_t, state = token.call("auto", compiled)
        assert torch.equal(k_t[:, 0], k_hat[:, t])
        assert torch.equal(v_t[:, 0], v_hat[:, t])
    assert state == new_state
    assert counter.frame_count == 1


def test_compiled_calls_refuse_boundaries_of_another_row():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kv_shift, backend=counter, dynamic=True)
    coefficients = torch.rand(2, 2)
    for length in (6, 7, 9):
        x = torch.randn(1, length, 2, 3)
        compiled(x, x, coefficients, coefficients, cu_seqlens=torch.tensor([0, 2, length]))
        for numbers in ([0, 2, length - 1], [0, length + 1, length], [1, 2, length]):
            with pytest.raises(RuntimeError, match="cu_seqlens must be non-decreasing from 0 to the number"):
                compiled(x, x, coefficients, coefficients, cu_seqlens=torch.tensor(numbers))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # in torch
@pytest.mark.parametrize("positions", [1, 2, 5])
def test_backward_that_is_compiled_after_an_eager_forward(positions):
    def gradients(compiled: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        k, v = (torch.randn(2, positions, 2, 4, generator=generator).requires_grad_() for _ in range(2))
        coefficients = torch.rand(2, 2, generator=generator).requires_grad_()
        k_hat, v_hat, _ = kv_shift(k, v, coefficients, coefficients, backend="eager")
        loss = k_hat.pow(2).sum() + v_hat.pow(3).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")) if compiled else nullcontext():
            loss.backward()
        return [cast(Tensor, x.grad) for x in (k, v, coefficients)]

    torch.testing.assert_close(gradients(True), gradients(False))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch.compile for the CPU")
def test_compiled_machine_code_rounds_once():
    case = random_case(3, 3, 31, **SIZES, rows=2, dtype=torch.bfloat16)
    compiled = torch.compile(kv_shift, fullgraph=True, dynamic=True)
    assert_within_one_rounding(case, "auto", through_state=True, op=compiled)


class Shift(nn.Module):
    """A module that calls the operator with its own parameters as coefficients."""

    def __init__(self, case: Case, backend: str = "auto") -> None:
        super().__init__()
        self.alpha, self.beta, self.backend = nn.Parameter(case.alpha), nn.Parameter(case.beta), backend

    def forward(
        self, k: Tensor, v: Tensor, state: ShiftState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, ShiftState]:
        return kv_shift(k, v, self.alpha, self.beta, state=state, mask=mask, backend=self.backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masked", "rows", "strict"),
    [
        pytest.param(False, None, False, id="plain"),
        pytest.param(False, 4, False, id="state"),
        pytest.param(True, None, False, id="mask"),
        pytest.param(True, 4, False, id="mask, state"),
        pytest.param(True, 4, True, id="mask, state, strict"),
    ],
)
def test_an_exported_program_takes_any_number_of_tokens(masked, rows, strict):
    def a_case(batch: int, positions: int) -> Case:
        mask = [[1] * (positions - b % positions) + [0] * (b % positions) for b in range(batch)] if masked else None
        return random_case(positions, batch, positions, window=3, rows=rows, mask=mask)

    example = a_case(3, 11)
    module = Shift(example)
    batch, positions = Dim("batch", min=2, max=64), Dim("positions", min=2, max=4096)
    tokens = {0: batch, 1: positions}
    state = None if rows is None else [{0: batch}, {0: batch}, None]
    program = torch.export.export(
        module,
        (example.k, example.v, example.state, example.mask),
        dynamic_shapes=(tokens, tokens, state, tokens if masked else None),
        strict=strict,
    )
    for size in ((2, 2), (3, 11), (5, 4), (7, 101)):
        case = a_case(*size)
        results = program.module()(case.k, case.v, case.state, case.mask)
        expected = module(case.k, case.v, case.state, case.mask)
        assert torch.equal(results[0], expected[0])
        assert torch.equal(results[1], expected[1])
        assert results[2] == expected[2]


def test_a_state_is_a_pytree():
    """Exported programs take and return states as pytrees."""
    state = random_case(5, rows=2).state
    leaves, structure = torch.utils._pytree.tree_flatten(state)
    assert leaves[0] is state.k
    assert leaves[1] is state.v
    assert torch.utils._pytree.tree_unflatten(leaves, structure) == state


def test_outcomes_of_fake_tensors_have_the_shapes_of_real_ones(fast_backend):
    """Planning tools run models on tensors without data."""
    case = random_case(7, rows=2, mask=[[1] * 11, [0] * 11])
    real = outcome(case, fast_backend)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = outcome(replace(case.map(mode.from_tensor), mask=mode.from_tensor(case.mask)), fast_backend)
        for name, x in fake.items():
            assert (x.shape, x.stride(), x.dtype) == (real[name].shape, real[name].stride(), real[name].dtype), name
