"""Layers under torch.compile: which implementation shifts, its results, and the memory it saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kvshift.ops import attention_inputs, dispatch
from kvshift.ops.dispatch import should_launch
from kvshift.ops.torch_ops import needs_traceable_ops
from kvshift.ops.triton.call import triton_unsupported_reason
from tests.layers.attention_cases import ATTENTION, GQA, MHA, make, tokens


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def kernels(monkeypatch) -> None:
    """Let CPU tensors take the Triton kernels, as GPU tensors do."""
    refusal = triton_unsupported_reason(torch.empty(0), 2)
    if refusal is not None:
        pytest.skip(refusal)
    monkeypatch.setattr(dispatch, "_AUTO", "triton")


@pytest.mark.parametrize("shifts", [False, True], ids=["vanilla", "shift"])
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("backend", ["auto", "triton", "eager"])
def test_on_a_gpu_training_is_compiled_around_the_kernels_and_generation_is_compiled_whole(backend, on_gpu, shifts):
    def ask() -> bool:
        return should_launch(backend, on_gpu, shifts=shifts)

    default = {"auto": on_gpu, "triton": True, "eager": False}[backend]
    compiled = torch.compile(ask, backend="eager", fullgraph=True)
    assert ask() == default
    assert compiled() == (default and (shifts or backend == "triton"))
    with torch.no_grad():
        assert ask() == default
        assert compiled() == (backend == "triton")


def test_exported_programs_are_of_plain_operations(monkeypatch):
    class Ask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + should_launch("auto", True, shifts=True)

    assert Ask()(torch.zeros(())) == 1
    for strict in (False, True):
        exported = torch.export.export(Ask(), (torch.zeros(()),), strict=strict)
        assert exported.module()(torch.zeros(())) == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ATTENTION)
@pytest.mark.parametrize(("heads", "normed"), [(MHA, False), (GQA, True)], ids=["mha", "gqa, norm"])
@pytest.mark.usefixtures("kernels")
def test_training_has_the_results_and_gradients_of_the_reference(heads, normed, where, monkeypatch):
    layer = make(heads, qk_norm=normed, shift_window=3)
    x = tokens(1 if where == "cu_seqlens" else 2, 11)

    def outcome(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out, state = call(leaf, **ATTENTION[where])
        grads = torch.autograd.grad((out * tokens(*out.shape[:2], seed=1)).sum(), [leaf, *layer.parameters()])
        return [out.detach(), *grads, state.shift.k, state.shift.v]

    counter = CompileCounterWithBackend("aot_eager")
    found = outcome(torch.compile(layer, backend=counter, fullgraph=True))
    monkeypatch.setattr(dispatch, "_AUTO", "reference")
    for own, expected in zip(found, outcome(layer), strict=True):
        rtol = 1e-6 if own.dtype == torch.float32 else 1e-11
        torch.testing.assert_close(own, expected, rtol=rtol, atol=1e-11)
    (graph,) = counter.graphs
    parts = [module for module in graph.modules() if isinstance(module, GraphModule)]
    assert sum("kvshift.shift" in part.code for part in parts) == 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_that_is_exported_with_the_kernels_has_one_launch_for_queries_too(strict):
    layer, x = make(GQA), tokens(2, 11)
    program = torch.export.export(layer, (x,), strict=strict)
    calls = [node for node in program.graph.nodes if "kvshift.shift" in str(node.target)]
    assert len(calls) == 1
    assert calls[0].args[0] is not None
    assert torch.equal(program.module()(x)[0], layer(x)[0])


def checkpoints(layer: nn.Module, x: Tensor) -> int:
    """Return the number of checkpoints in the graph of a training step."""
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    torch.compile(layer, backend=counter, fullgraph=True)(x)
    return sum(len(list(graph.children())) for graph in counter.graphs)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "targets", [("k",), *(pytest.param(x, marks=pytest.mark.slow) for x in [("v",), ("q", "k", "v")])], ids=str
)
def test_only_keys_or_only_values_are_recomputed_and_what_is_frozen_stays(targets, monkeypatch):
    """Values that are not shifted pass through the checkpoint unchanged."""
    x = tokens(2, 11)
    layer = make(GQA, shift_targets=targets, qk_norm=True)
    for parameter in layer.shift.parameters():
        parameter.requires_grad_(targets != ("k",))
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=True)
    found = torch.autograd.grad(compiled(x)[0].square().sum(), trained)
    monkeypatch.setattr(dispatch, "_AUTO", "reference")
    expected = torch.autograd.grad(layer(x)[0].square().sum(), trained)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5 if own.dtype == torch.float32 else 1e-10, atol=1e-10)


def test_transforms_of_functions_are_seen_when_compiled_too():
    def watched(x: Tensor) -> Tensor:
        return x.sum() * needs_traceable_ops()

    x = torch.ones(3)
    assert torch.compile(watched, backend="eager", fullgraph=True)(x) == 0
    for call in (torch.func.grad(watched), torch.compile(torch.func.grad(watched), backend="eager", fullgraph=True)):
        assert torch.equal(call(x), x)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_where_ddp_refuses_checkpoints_all_is_kept(monkeypatch):
    layer, x = make(GQA), tokens(2, 11)
    assert checkpoints(layer, x) == 1
    with torch.no_grad():
        assert checkpoints(layer, x) == 0
    monkeypatch.setattr(attention_inputs, "_DDP_TAKES_CHECKPOINTS", False)
    assert checkpoints(layer, x) == 1
    ddp = nn.Identity()
    ddp.bucket_bytes_cap = 25 * 2**20
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", ddp)
    assert checkpoints(layer, x) == 0
    monkeypatch.setattr(attention_inputs, "_DDP_TAKES_CHECKPOINTS", True)
    if torch.__version__ >= (2, 13):
        assert checkpoints(layer, x) == 1


class Blocks(nn.Module):
    def __init__(self, targets: tuple, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(MHA, shift_targets=targets, dtype=torch.float32) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(self._output, layer, x, use_reentrant=False) if self.checkpointed else layer(x)[0])
        return x

    def _output(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)[0]


def bytes_in_the_graph(run: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd saves, without leaves and results, and without the interpreter's own memory."""
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is reused
    leaves: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if x.is_leaf and x.requires_grad:
            leaves.add(storage._cdata)
        else:
            kept[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    without = {*leaves, result.untyped_storage()._cdata}
    return sum(storage.nbytes() for address, storage in kept.items() if address not in without)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "activation checkpointing"])
@pytest.mark.usefixtures("kernels")
@pytest.mark.slow
def test_what_is_kept_for_backward_is_what_plain_attention_keeps(checkpointed):
    """The shift adds only the halves of the rotary tables that the kernels read, once for all layers."""
    x = tokens(2, 64, dtype=torch.float32).requires_grad_()
    kept = []
    for targets in ((), ("k", "v")):
        torch._dynamo.reset()
        blocks = Blocks(targets, checkpointed=checkpointed)
        compiled = torch.compile(blocks, backend="aot_eager_decomp_partition", fullgraph=True)
        compiled(x)
        kept.append(bytes_in_the_graph(lambda call=compiled: call(x)))
    tables = 2 * 64 * (blocks.layers[0].head_dim // 2) * 4
    assert 0 <= kept[1] - kept[0] <= tables
