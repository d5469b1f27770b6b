"""Measure an attention layer with QK-norm and rotary embedding, with the shift and without, which is the baseline.

    python benchmarks/layer.py [--preset laptop] [--out FOLDER]

Forward alone, and with backward; on CUDA also compiled. Both layers have the same weights, and each is compared with
itself in float64 before it is timed (`exact.py`).
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from allocated import bytes_saved
from exact import SLICE, compare, to_reference
from timing import Benchmark, Implementation, arguments
from torch import Tensor

from kvshift import KVShiftAttention, ShiftOptions

TARGETS: dict[str, tuple[Any, ...]] = {"without shift": (), "kv shift": ("k", "v")}
SIZES = {  # (batch, length, width), query heads, KV heads, dtype; rounds
    "smoke": ([((2, 67, 48), 6, 3, "float32")], 3),
    "laptop": ([((4, 512, 512), 8, 4, "float32"), ((4, 512, 512), 8, 4, "bfloat16")], 30),
    "paper": ([((4, 4096, 2560), 20, 4, "bfloat16"), ((8, 4096, 768), 12, 4, "bfloat16")], 50),
}


def make(layer: KVShiftAttention, x: Tensor, grad: Tensor, backward: bool, compiled: bool) -> Implementation:
    call: Any = torch.compile(layer, dynamic=False) if compiled else layer
    parameters = dict(layer.named_parameters())

    def results(call: Any, x: Tensor, grad: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.set_grad_enabled(backward):
            out = call(x)[0]
        found = {"output": out.detach()[SLICE]}
        if backward:
            gradients = torch.autograd.grad(out, [x, *leaves.values()], grad)
            found |= {f"gradient of {name}": value for name, value in zip(["x", *leaves], gradients, strict=True)}
            found["gradient of x"] = found["gradient of x"][SLICE]
        return found

    def check() -> float:
        exact = to_reference(copy.deepcopy(layer))
        few, cut = x.detach()[SLICE].double().requires_grad_(), torch.zeros_like(grad)
        cut[SLICE] = grad[SLICE]
        wanted = results(exact, few, cut[SLICE].double(), dict(exact.named_parameters()))
        return compare(results(call, x, cut, parameters), wanted, x.dtype)

    def run_forward(_: int) -> None:
        with torch.no_grad():
            call(x)

    def run_both(_: int) -> None:
        torch.autograd.grad(call(x)[0], [x, *parameters.values()], grad)

    return Implementation(
        run=run_both if backward else run_forward,
        check=check,
        saved=(lambda: bytes_saved(lambda: call(x)[0], x.device)) if backward else None,
    )


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    bench, (sizes, rounds) = Benchmark(options), SIZES[options.preset]
    ways = (False, True) if bench.compiled and bench.device.type == "cuda" else (False,)
    for size, what, compiled in itertools.product(sizes, ("forward", "forward and backward"), ways):
        shape, heads, kv_heads, dtype = size

        def implementations(size: Any = size, what: str = what, compiled: bool = compiled) -> dict[str, Callable]:
            (batch, length, width), heads, kv_heads, dtype_name = size
            placed = {"device": bench.device, "dtype": getattr(torch, dtype_name)}
            torch.manual_seed(0)
            layers = {
                name: KVShiftAttention(
                    width, heads, kv_heads, qk_norm=True, shift_options=ShiftOptions(targets=targets), **placed
                )
                for name, targets in TARGETS.items()
            }
            layers["kv shift"].load_state_dict(layers["without shift"].state_dict(), strict=False)
            x = torch.randn(batch, length, width, **placed).requires_grad_()
            grad = torch.randn(batch, length, width, **placed)
            backward = what != "forward"
            return {name: functools.partial(make, one, x, grad, backward, compiled) for name, one in layers.items()}

        name = f"{shape}, {heads} heads, {kv_heads} KV heads, {dtype} {what}" + (", compiled" if compiled else "")
        facts = {"shape": list(shape), "dtype": dtype, "pass": what, "compiled": compiled}
        bench.case("layer", name, implementations, rounds=options.rounds or rounds, device_time=True, **facts)
    bench.finish()


if __name__ == "__main__":
    main()
