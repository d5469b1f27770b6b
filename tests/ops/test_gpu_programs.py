"""The operator on a CUDA device: tensors on the device, memory, graphs, compilers and several devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kvshift.ops import ShiftState, comparison, kv_shift
from kvshift.ops.triton import launch as triton_launch

from . import checks
from .cases import Case, assert_same_bits, outcome, random_case
from .device import DEVICE, MARKS, needs_cuda, there
from .rounding import assert_within_one_rounding
from .test_compile import MODES as COMPILED
from .test_promises import MODES
from .triton.test_call import check_operator_keeps_the_rules_of_torch_library

# torch.compile instantiates every autograd function that it traces.
pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings(r"ignore:<class 'torch\.autograd\.function\.Function'>:DeprecationWarning"),
]
COMPILER = "inductor" if DEVICE.type == "cuda" else "aot_eager"
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def on_device(op: Callable) -> Callable:
    """Return a version of `op` for tensors on the CPU, which runs forward and backward on the device."""

    def carried(*tensors: Tensor, **options: Any) -> Any:
        moved = {name: x.to(DEVICE) if isinstance(x, Tensor | ShiftState) else x for name, x in options.items()}
        k_hat, v_hat, state = op(*(x.to(DEVICE) for x in tensors), **moved)
        return k_hat.cpu(), v_hat.cpu(), state.to("cpu")

    return carried


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list whose only number counts how often kernels are requested."""
    counted, real = [0], triton_launch.kernels()

    def count() -> Any:
        counted[0] += 1
        return real

    monkeypatch.setattr(triton_launch, "kernels", count)
    return counted


# Inputs on the device


@modes
def test_callers_tensors_are_theirs(mode):
    checks.check_inputs_are_left_alone(there(random_case(2, **mode)), "triton")


@modes
def test_results_on_the_device_are_those_of_the_reference(mode):
    assert_within_one_rounding(random_case(3, **mode), "triton", through_state=True, op=on_device(kv_shift))


@needs_cuda
def test_auto_takes_the_kernels(launches):
    case = there(random_case(5, rows=2))
    case.call("eager")
    assert launches == [0]
    assert_same_bits(outcome(case, "auto"), outcome(case, "triton"))
    assert launches[0] > 0


@needs_cuda
@pytest.mark.parametrize("shape", [{"batch": 4, "positions": 2048}, {"lengths": [4000, 0, 1, 4191]}], ids=str)
def test_the_same_bits_on_every_run(shape):
    case = there(random_case(7, heads=4, k_dim=128, v_dim=128, rows=1, dtype=torch.bfloat16, **shape))
    first = outcome(case, "triton")
    for _ in range(3):
        assert_same_bits(outcome(case, "triton"), first)


# Memory


@needs_cuda
@pytest.mark.parametrize("state", [False, True], ids=["", "state"])
def test_peak_memory_is_the_results_and_the_gradients(state):
    """One MiB is added for partial sums and for the rounding up of sizes."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    k, v, gk, gv = (
        torch.randn(2, 4096, 4, 128, dtype=torch.bfloat16, device=DEVICE, generator=generator) for _ in range(4)
    )
    coefficients = torch.randn(4, 2, device=DEVICE, generator=generator).requires_grad_()
    state = ShiftState.zeros(2, 4, 128, rows=1, dtype=k.dtype, device=DEVICE) if state else None
    leaves = [k.requires_grad_(), v.requires_grad_(), coefficients]
    kept = peak = 0
    for _ in range(2):  # the first iteration compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        k_hat, v_hat, _ = kv_shift(k, v, coefficients, coefficients, state=state, backend="triton")
        kept = torch.cuda.memory_allocated() - before
        gradients = torch.autograd.grad((k_hat, v_hat), leaves, (gk, gv))
        peak = torch.cuda.max_memory_allocated() - before
        del gradients, k_hat, v_hat
    assert kept <= 2 * k.nbytes + 2**20
    assert peak <= 4 * k.nbytes + 2**20


@needs_cuda
def test_a_tensor_of_more_than_2_to_the_31_elements():
    """The keys take 4.3 GB; the last tokens equal those of a small call that continues from the token before them."""
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("the device has less than 24 GB to spare")
    positions = 2**31 // 128 + 999
    generator = torch.Generator(DEVICE).manual_seed(3)
    k = torch.empty(1, positions, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    v = torch.empty(1, positions, 1, 8, dtype=torch.bfloat16, device=DEVICE)
    for x in (k, v):
        x.normal_(generator=generator)
    assert k.numel() > 2**31
    coefficients = torch.tensor([[0.75, -1.5]], device=DEVICE)
    end = slice(positions - 500, positions)
    state = ShiftState(k[:, end.start - 1 : end.start].clone(), v[:, end.start - 1 : end.start].clone(), 1)
    case = Case(k[:, end].clone(), v[:, end].clone(), coefficients, coefficients, state)
    case = replace(case, grads=tuple(torch.randn_like(x) for x in (case.k, case.v, state.k, state.v)))
    expected = outcome(case, "triton", through_state=False)
    k_hat, v_hat, _ = kv_shift(k.requires_grad_(), v.requires_grad_(), coefficients, coefficients, backend="triton")
    assert torch.equal(k_hat[:, end], expected["k_hat"])
    assert torch.equal(v_hat[:, end], expected["v_hat"])
    g = torch.zeros_like(k_hat)
    g[:, end] = case.grads[0]
    del k_hat
    gk, gv = torch.autograd.grad(
        kv_shift(k, v, coefficients, coefficients, backend="triton")[:2], (k, v), (g, torch.zeros_like(v_hat))
    )
    assert torch.equal(gk[:, end], expected["gradient of k"])
    assert not gk[:, : end.start - 1].any()
    assert not gv.any()


# Graphs and compilers


@modes
def test_operators_keep_the_rules_of_torch_library(mode):
    check_operator_keeps_the_rules_of_torch_library(there(random_case(79, **({"batch": 2, "positions": 3} | mode))))


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("state, window 3", torch.float32), ("pack, state", torch.bfloat16), ("padding, state", torch.bfloat16)],
    ids=str,
)
@pytest.mark.usefixtures("nothing_compiled_before")
def test_one_compiled_graph_trains_on_any_number_of_tokens(mode, dtype, backend):
    """The operator is decomposed for the compiler, which fuses it with its neighbours, unless backend is "triton"."""
    counter = CompileCounterWithBackend(COMPILER)
    compiled = torch.compile(kv_shift, backend=counter, fullgraph=True, dynamic=True)
    for positions in (7, 2, 13):
        case = COMPILED[mode](positions)
        case = replace(case.map(lambda x: x.to(dtype)), alpha=case.alpha, beta=case.beta)
        assert_within_one_rounding(case, backend, through_state=True, op=on_device(compiled))
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    assert ("kvshift.shift" in graph.code) == (backend == "triton")


@needs_cuda
@modes
def test_a_cuda_graph_trains(mode):
    """A graph that is captured once can be replayed with other numbers, documents and padding in the same tensors."""
    static = there(random_case(11, **mode))
    leaves = [x.requires_grad_() for x in static.leaves().values()]

    def train() -> list[Tensor]:
        k_hat, v_hat, state = static.call("triton")
        results = [k_hat, v_hat, state.k, state.v]
        return [*results, *torch.autograd.grad(results, leaves, static.grads)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train()
    for seed in (13, 17):
        other = random_case(seed, **mode)
        if other.mask is not None:
            other = replace(other, mask=other.mask.flip(1))
        if other.cu_seqlens is not None:
            other = replace(other, cu_seqlens=other.cu_seqlens[-1] - other.cu_seqlens.flip(0))
        with torch.no_grad():
            for x, y in zip(tensors(static), tensors(other), strict=True):
                x.copy_(y)
        graph.replay()
        for x, y in zip(captured, outcome(there(other), "triton").values(), strict=True):
            assert torch.equal(x, y)


def tensors(case: Case) -> list[Tensor]:
    return [*case.leaves().values(), *(x for x in case.where().values() if x is not None), *case.grads]


# Several devices


@needs_cuda
def test_tensors_on_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    case = random_case(23, rows=2)
    expected = outcome(there(case), "triton")
    for name, result in outcome(there(case, torch.device("cuda", 1)), "auto").items():
        assert result.device.index == 1
        assert torch.equal(result.cpu(), expected[name].cpu()), name


# The report


def test_the_comparison_of_the_report_finds_nothing_wrong(monkeypatch):
    if DEVICE.type != "cuda":
        monkeypatch.setattr(comparison, "_DTYPES", (torch.bfloat16,))  # the interpreter is slow
    lines = list(comparison.compare_backends(DEVICE))
    assert [line for line in lines if not line.endswith(": right")] == []
    assert any(line.startswith(f"triton on {DEVICE}") for line in lines)
