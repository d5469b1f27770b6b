"""Small calls on a device, compared with the reference: what `python -m kvshift --test` does.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.cpu.kernel import cpu_unsupported_reason
from kvshift.ops.state import ShiftState
from kvshift.ops.triton.call import triton_unsupported_reason

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_B, _T, _H, _G, _D = 2, 67, 5, 3, 20  # more positions than a tile has
_WINDOWS = {"sequences": 2, "packed documents": 3, "documents with padding": 2}
_BOUNDARIES: dict[str, dict[str, list]] = {
    "sequences": {},
    "packed documents": {"cu_seqlens": [0, 40, 40, 41, 42, _T]},
    "documents with padding": {
        "seq_idx": [[t // 5 for t in range(_T)], [t // 64 for t in range(_T)]],
        "mask": [[t % 7 != 3 for t in range(_T)], [2 < t < 66 for t in range(_T)]],
    },
}


def compare_backends(device: torch.device) -> Iterator[str]:
    """Compare every backend that the device has with the reference, and yield a line for each backend and dtype.

    Each shifts whole sequences, packed documents, and documents with padding that holds NaN, in training and inference.
    Triton kernels also do so with QK-norm and rotary embedding in the same launch. The error allowed in an element is

        (2 eps(dtype of the result) + 1024 eps(dtype of the arithmetic)) max |exact|

    The error of a wrong row is about as large as the largest element. Errors of right sums were at most 4 eps of the
    arithmetic, except 66 eps for alpha before a norm, where terms nearly cancel.

    Raises:
        AssertionError: after the last line, if a result was wrong or could not be computed.
    """
    wrong = 0
    refusals = {"cpu": cpu_unsupported_reason, "triton": triton_unsupported_reason, "eager": lambda *_: None}
    for backend, refusal in refusals.items():
        if refusal(torch.empty(0, device=device), 3) is not None:
            continue
        for dtype in _DTYPES:
            faults = []
            for name, rotates, trains in itertools.product(_BOUNDARIES, {False, backend == "triton"}, (True, False)):
                call = (name, dtype, rotates, trains)
                try:
                    _assert_close(_outcome(*call, device, backend), _exact(*call), dtype)
                except Exception as error:  # compilers and drivers raise exceptions of many types
                    kind = f"{name}{', rotated' * rotates}, {'training' if trains else 'inference'}"
                    faults.append(f"{kind}: {' '.join(str(error).split()) or type(error).__name__}")
            wrong += len(faults)
            yield f"{backend} on {device}, {str(dtype).removeprefix('torch.')}: {'; '.join(faults) or 'right'}"
    if wrong:
        raise AssertionError(f"{wrong} calls were wrong; please report this output")


def _assert_close(results: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    arithmetic = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for name, expected in exact.items():
        allowed = (2 * torch.finfo(results[name].dtype).eps + 1024 * arithmetic) * expected.abs().max().item()
        result = results[name].to(expected.device, torch.float64)
        torch.testing.assert_close(
            result, expected, rtol=0, atol=allowed, msg=lambda text, name=name: f"{name}: {text}"
        )


@functools.cache
def _exact(name: str, dtype: torch.dtype, rotates: bool, trains: bool) -> dict[str, Tensor]:
    return _outcome(name, dtype, rotates, trains, torch.device("cpu"), "reference", torch.float64)


def _outcome(
    name: str,
    dtype: torch.dtype,
    rotates: bool,
    trains: bool,
    device: torch.device,
    backend: str,
    compute: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the results of a call by name, and its gradients in training; `compute` widens the same numbers."""
    generator = torch.Generator().manual_seed(20)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device, compute)

    window, bounds = _WINDOWS[name], {key: torch.tensor(x, device=device) for key, x in _BOUNDARIES[name].items()}
    batch, sequences = (1, len(bounds["cu_seqlens"]) - 1) if "cu_seqlens" in bounds else (_B, _B)
    leaves = {name: normal(batch, _T, heads, _D) for name, heads in {"q": _H, "k": _G, "v": _G}.items()}
    leaves |= {name: normal(_G, window, dtype=torch.float32) for name in ("alpha", "beta")}
    if "mask" in bounds:
        leaves["k"][~bounds["mask"]] = leaves["v"][~bounds["mask"]] = torch.nan
    inputs: dict[str, Any] = {**leaves, **bounds}
    if rotates:
        angles = normal(batch, _T, 1, _D // 2, dtype=torch.float32).float()
        tables = [table.to(angles.device, compute) for table in (angles.cos(), angles.sin())]
        norms = nn.RMSNorm(_D, 1e-6), nn.RMSNorm(_D, 1e-6)
        for name, norm in zip("qk", norms, strict=True):
            leaves[f"gain of {name}"] = norm.weight = nn.Parameter(normal(_D))
        inputs |= {"rotary": tuple(tables), "norms": norms}
    else:
        leaves.pop("q")
        inputs["q"] = None
    if not (rotates and trains):  # a launch that rotates passes no gradient to a state
        rows = normal(sequences, window + 1, _G, _D), normal(sequences, window + 1, _G, _D)
        leaves |= {"state.k": rows[0], "state.v": rows[1]}
        inputs["state"] = ShiftState(*rows, window + 1)
    with torch.set_grad_enabled(trains):
        for x in leaves.values():
            x.requires_grad_(trains)
        *outputs, state = cast(tuple[Any, ...], shift_norm_rope(**inputs, backend=backend))
        results: dict[str, Any] = {**dict(zip("qkv", outputs, strict=True)), "state.k": state.k, "state.v": state.v}
        results = {name: y for name, y in results.items() if y is not None}
        if trains:
            ys = [y for y in results.values() if y.requires_grad]
            upstream = [normal(*y.shape) for y in ys]
            gradients = torch.autograd.grad(ys, list(leaves.values()), upstream, materialize_grads=True)
            results |= {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: y.detach() for name, y in results.items()}
