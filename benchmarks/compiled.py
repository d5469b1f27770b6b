"""Count the bytes that a training step compiled for an H200 moves and saves, without needing an H200.

    python benchmarks/compiled.py [--out FOLDER]

Inductor plans before it generates code: its plan determines which operations are fused into one kernel and which
tensors each kernel reads and writes. The script counts them for one decoder layer of the paper's sizes in bfloat16 (a
model of two layers minus a model of one): bytes moved, each tensor once for each kernel that touches it, and bytes
saved for backward. Matrix products and attention, which all implementations share, are excluded. Attention is an opaque
operator, because a GPU's attention does not run here. Nothing is timed: only shapes are traced, and no tensor has data.

Each line of FOLDER/rows.jsonl has an implementation's bytes and kernels, commit, versions and the hash of the options.
Inductor's plan is not a public interface: the script runs with torch 2.13.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from exact import use_backend
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvshift.models.decoder import ShiftedDecoder
from kvshift.models.llama import SIZES, KVShiftLlamaConfig, KVShiftLlamaModel
from kvshift.ops import attention_inputs
from kvshift.ops.triton import call as triton_call
from kvshift_lab.core.environment import environment
from kvshift_lab.core.json_lines import write_lines
from kvshift_lab.core.options import digest

OPTIONS = {"sizes": ["0.2B", "2.9B"], "shape": [2, 4096], "dtype": "bfloat16", "gpu": "NVIDIA H200"}
WITHOUT, PLAIN = "without shift", "kv shift, plain operations"
KEPT, AUTO = "kv shift, kernels for keys and values", "kv shift, those kernels and made again in backward"
GPU = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 10**9,
    warp_size=32,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)

Row = dict[str, Any]


# Attention as an opaque operator


@torch.library.custom_op("planned::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise NotImplementedError("this operator is only traced, never run")


@torch.library.custom_op("planned::attention_backward", mutates_args=())
def attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    raise NotImplementedError("this operator is only traced, never run")


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


@attention_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v)]


attention.register_autograd(
    lambda ctx, g: tuple(attention_backward(g, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


# Plans


class Planner:
    """A replacement for Inductor's compiler that plans each graph for the GPU and returns the graph uncompiled."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        is_backward = bool(options.get("is_backward"))
        row = {
            "pass": "backward" if is_backward else "forward",
            **self._plan(copy.deepcopy(graph), inputs, is_backward),
        }
        self.rows.append(row)
        return compile_fx.make_boxed_func(graph.forward)

    def _plan(self, graph: GraphModule, inputs: Sequence[Any], is_backward: bool) -> Row:
        mode = detect_fake_mode(inputs)
        assert mode is not None
        debug = DebugContext()
        with V.set_fake_mode(mode), V.set_debug_handler(debug):
            with mode:
                there = [x if not isinstance(x, Tensor) else _on_gpu(x) for x in inputs]
                _move(graph)
                FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*there)
            compile_fx.view_to_reshape(graph)
            compile_fx.record_original_output_strides(graph)
            compile_fx._recursive_post_grad_passes(graph, is_inference=False)
            lowering = GraphLowering(graph, example_inputs=there, is_backward=is_backward)
            with V.set_graph_handler(lowering):
                lowering.run(*there)
                planned = scheduler.Scheduler(lowering.operations)
                lowering.scheduler = planned
                kernels = [(_describe(node), node.get_read_write_buffers_sizes()) for node in planned.nodes]
        found = {"kernels": [{"kernel": name, "bytes": size} for name, size in kernels if size]}
        found["moved_bytes"] = sum(size for name, size in kernels if not name.startswith("shared"))
        if not is_backward:
            found["saved_bytes"] = _saved(graph)
        return found


def _on_gpu(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def _move(graph: GraphModule) -> None:
    """Replace every device in the arguments of operations by the GPU; the graph was traced on the CPU."""

    def moved(value: Any) -> Any:
        return torch.device("cuda", 0) if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args = tuple(map(moved, node.args))
        node.kwargs = {name: moved(value) for name, value in node.kwargs.items()}


def _describe(node: Any) -> str:
    """Return "shared: ..." for matrix products and attention, else the operator or the operations fused in a kernel."""
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        kernel = str(getattr(node.node, "python_kernel_name", None) or type(node.node).__name__)
        is_shared = "planned." in kernel or kernel.rsplit(".", 1)[-1] in ("mm", "addmm", "bmm")
        return f"shared: {kernel}" if is_shared else kernel
    origins = dict.fromkeys(origin.name for part in node.get_nodes() for origin in part.node.origins)
    return " ".join(origins)


def _saved(graph: GraphModule) -> int:
    """Return the bytes that forward saves for backward, without its inputs, which exist anyway, and its result."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    kept = {node for node in output.args[0][1:] if isinstance(node, torch.fx.Node) and node.op != "placeholder"}
    values = [node.meta["val"] for node in kept]
    return sum(x.untyped_storage().nbytes() for x in values if isinstance(x, Tensor))


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Answer all queries about the GPU, from Inductor and the kernels, as for an H200."""
    answers: dict[str, Any] = {
        "get_compute_capability": lambda device=None: 90,
        "get_device_properties": lambda device=None: GPU,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(answer)))
        properties = staticmethod(lambda device=None: GPU)
        stack.enter_context(patch.object(CudaInterface.Worker, "get_device_properties", properties))
        for name, answer in {
            "get_device_properties": lambda device=None: GPU,
            "get_device_capability": lambda device=None: (9, 0),
            "current_device": lambda: 0,
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(triton_call, "_IS_INTERPRETED", True))  # allows kernels on CPU tensors
        stack.enter_context(patch.object(ShiftedDecoder, "_refuse_unknown_attention", lambda self: None))
        stack.enter_context(config.patch(fx_graph_cache=False))
        yield


# Models


def planned(implementation: str, fields: dict[str, Any], batch: int, length: int) -> dict[str, Row]:
    """Return the plans of forward and backward, by pass."""
    torch._dynamo.reset()
    AttentionInterface.register("planned", lambda module, q, k, v, mask, **_: (attention(q, k, v), None))
    AttentionMaskInterface.register("planned", lambda *_, **__: None)
    targets = () if implementation == WITHOUT else ("k", "v")
    with torch.device("meta"):
        settings = KVShiftLlamaConfig(**fields, shift_targets=targets, attn_implementation="planned")
        model = KVShiftLlamaModel(settings).to(torch.bfloat16)
    use_backend("eager" if implementation in (WITHOUT, PLAIN) else "triton", model)
    planner = Planner()
    with ExitStack() as stack:
        stack.enter_context(fake_gpu())
        if implementation == KEPT:

            def kept(function: Callable, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                return function(k, v)

            stack.enter_context(patch.object(attention_inputs, "compiled_to_recompute", kept))
        with FakeTensorMode(allow_non_fake_inputs=True):
            _fill(model)
            x = torch.empty(batch, length, settings.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            compiled = torch.compile(
                model,
                backend=lambda graph, inputs: compile_fx.compile_fx(graph, inputs, inner_compile=planner),
                fullgraph=True,
                dynamic=False,
            )
            out = compiled(inputs_embeds=x, use_cache=False).last_hidden_state
            out.backward(torch.empty_like(out))
    return {row.pop("pass"): row for row in planner.rows}


def _fill(model: nn.Module) -> None:
    """Replace parameters and buffers by tensors without data, in the active fake mode."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def layer(implementation: str, fields: dict[str, Any], batch: int, length: int) -> Row:
    """Return the bytes that a second layer adds to a model of one layer, and the kernels of the model of one layer."""
    one, two = (planned(implementation, {**fields, "num_hidden_layers": n}, batch, length) for n in (1, 2))
    row: Row = {"contestant": implementation}
    for name in ("forward", "backward"):
        row[f"{name}_bytes"] = two[name]["moved_bytes"] - one[name]["moved_bytes"]
    row["saved_bytes"] = two["forward"]["saved_bytes"] - one["forward"]["saved_bytes"]
    row["kernels_of_one_layer"] = {name: one[name]["kernels"] for name in ("forward", "backward")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/compiled"))
    out = parser.parse_args().out
    found = environment(torch.device("cpu"), 1)
    stamp = {name: found[name] for name in ("started", "commit", "versions", "hardware", "platform")}
    stamp |= {"options": OPTIONS, "config_hash": digest(OPTIONS)}
    rows = []
    for size, implementation in itertools.product(OPTIONS["sizes"], (WITHOUT, PLAIN, KEPT, AUTO)):
        rows.append(
            {"model": size, **layer(implementation, {**SIZES[size], "vocab_size": 8}, *OPTIONS["shape"]), **stamp}
        )
        print(_line(rows[-1], next(row for row in rows if row["model"] == size)), flush=True)
    write_lines(out / "rows.jsonl", rows)


def _line(row: Row, base: Row) -> str:
    names = ("forward_bytes", "backward_bytes", "saved_bytes")
    cells = [f"{row[name] / 2**20:9.2f} ({(row[name] - base[name]) / 2**20:+8.2f})" for name in names]
    return f"{row['model']}, {row['contestant']:52} forward, backward, kept, MiB: {'  '.join(cells)}"


if __name__ == "__main__":
    main()
