"""Part "layer": an attention layer with QK-norm and rotary embedding, with and without the shift."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kvshift.layers import KVShiftAttention, ShiftOptions
from kvshift_lab.benchmarks.activation_memory import bytes_saved
from kvshift_lab.benchmarks.cases import Case, Implementation, Session
from kvshift_lab.benchmarks.float64_parity import SLICE, compare_tensors, to_reference
from kvshift_lab.benchmarks.presets import LayerSize

_TARGETS: dict[str, tuple[Any, ...]] = {"without shift": (), "kv shift": ("k", "v")}


def layer_cases(session: Session) -> Iterator[Case]:
    """Yield a case for each layer of the preset, forward alone and with backward; on CUDA also compiled."""
    ways = (False, True) if session.compiled and session.device.type == "cuda" else (False,)
    passes = ("forward", "forward and backward")
    for size, what, compiled in itertools.product(session.preset.layers, passes, ways):
        yield _case(session, size, what, compiled)


def _case(session: Session, size: LayerSize, what: str, compiled: bool) -> Case:
    dtype = str(size.dtype).removeprefix("torch.")
    shape = [size.batch, size.length, size.embed_dim]
    name = f"{tuple(shape)}, {size.heads} heads, {size.kv_heads} KV heads, {dtype} {what}"

    def build() -> dict[str, Callable[[], Implementation]]:
        torch.compiler.reset()
        torch.manual_seed(0)
        layers = {
            name: KVShiftAttention(
                size.embed_dim,
                size.heads,
                size.kv_heads,
                qk_norm=True,
                shift_options=ShiftOptions(targets=targets),
                device=session.device,
                dtype=size.dtype,
            )
            for name, targets in _TARGETS.items()
        }
        layers["kv shift"].load_state_dict(layers["without shift"].state_dict(), strict=False)
        x = torch.randn(shape, device=session.device).to(size.dtype).requires_grad_()
        grad = torch.randn(shape, device=session.device).to(size.dtype)
        return {
            name: functools.partial(_implementation, layer, x, grad, what != "forward", compiled)
            for name, layer in layers.items()
        }

    return Case(
        part="layer",
        name=f"{name}, compiled" if compiled else name,
        baseline="without shift",
        build=build,
        facts={"shape": shape, "dtype": dtype, "pass": what, "compiled": compiled},
        clock=session.device_clock,
        rounds=session.rounds,
    )


def _implementation(layer: KVShiftAttention, x: Tensor, grad: Tensor, backward: bool, compiled: bool) -> Implementation:
    call: Any = torch.compile(layer, dynamic=False) if compiled else layer
    names = dict(layer.named_parameters())

    def results(call: Any, x: Tensor, grad: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.set_grad_enabled(backward):
            out = call(x)[0]
        found = {"output": out.detach()[SLICE]}
        if backward:
            wanted = torch.autograd.grad(out, [x, *leaves.values()], grad)
            found |= {f"gradient of {name}": g for name, g in zip(["x", *leaves], wanted, strict=True)}
            found["gradient of x"] = found["gradient of x"][SLICE]
        return found

    def check() -> dict[str, Any]:
        exact = to_reference(copy.deepcopy(layer))
        few, cut = x.detach()[SLICE].double().requires_grad_(), torch.zeros_like(grad)
        cut[SLICE] = grad[SLICE]
        wanted = results(exact, few, cut[SLICE].double(), dict(exact.named_parameters()))
        return compare_tensors(results(call, x, cut, names), wanted, x.dtype)

    def run_forward(_: int) -> None:
        with torch.no_grad():
            call(x)

    def run_both(_: int) -> None:
        torch.autograd.grad(call(x)[0], [x, *names.values()], grad)

    return Implementation(
        run=run_both if backward else run_forward,
        check=check,
        saved=(lambda: bytes_saved(lambda: call(x)[0], x.device)) if backward else None,
    )
