"""The operator through the compiled kernel of `kernel.cpp`: one pass over memory forward, one backward.

The kernel is built when the package is installed (`hatch_build.py`). Where it is missing, or cannot take the tensors,
`cpu_refusal` says why, and "auto" takes `torch_ops.shift_eager`, which computes the same bits.

Shapes: B batch, T positions, S sequences, R rows of state, Q rows of state per batch entry, G KV heads, D head
size, W window.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvshift.ops.torch_ops import differentiable

_DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# What torch calls the machine: what the compiler does; rows whose gradients of coefficients are summed in float32,
# before those sums are added in float64. Half as many lanes would each add up twice as many terms.
_BUILDS = {"AVX512": ("x86-64-v4", 32), "AVX2": ("x86-64-v3", 16)}
_MAX_WINDOW = 16
_PARALLEL = 2**15  # elements from which a second thread pays
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_ROWS = (_POINTER, _INT, _INT, _INT)  # a tensor (B, rows, G, D) and its first three strides


def cpu_refusal(x: Tensor, window: int) -> str | None:
    """Why the kernel cannot take x, a plain tensor; None if it can."""
    if torch.compiler.is_compiling():
        return "it is not for torch.compile, which makes code of its own"
    if not x.is_cpu:
        return f"it runs on the CPU, the tensors are on {x.device}"
    if x.dtype not in _DTYPES:
        return f"it knows {', '.join(_DTYPES.values())}, the tensors are {x.dtype}"
    if window > _MAX_WINDOW:
        return f"its window is {_MAX_WINDOW} at most, got {window}"
    return _kernels().refusal


def _forward(x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    x, state, weights = _dense_heads(x), state.contiguous(), _weights(coefficients, x)
    _kernels().forward[x.dtype](
        *_sizes(x, state, coefficients),
        y.data_ptr(),
        *_rows(x),
        *_state_rows(state, x),
        weights.data_ptr(),
        None if sources is None else sources.data_ptr(),
        _threads(x),
    )
    return y


def _backward(
    grad_y: Tensor,
    x: Tensor,
    coefficients: Tensor,
    state: Tensor,
    sources: Tensor | None,
    readers: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    grad_state = torch.empty(state.shape, dtype=x.dtype, device="cpu")
    grad_y, x, state, weights = _dense_heads(grad_y), _dense_heads(x), state.contiguous(), _weights(coefficients, x)
    sizes = _sizes(x, state, coefficients)
    batch, positions, *_, slots = sizes
    threads = _threads(x)
    kernels = _kernels()
    spans = max(1, batch * (slots + positions) // kernels.rows_per_sum)
    sums = torch.empty(spans, *coefficients.shape, dtype=torch.float64, device="cpu")
    scratch = torch.empty(threads, *coefficients.shape, 128, dtype=torch.uint8, device="cpu")
    kernels.backward[x.dtype](
        *sizes,
        grad_x.data_ptr(),
        grad_state.data_ptr(),
        sums.data_ptr(),
        scratch.data_ptr(),
        spans,
        *_rows(grad_y),
        *_rows(x),
        *_state_rows(state, x),
        weights.data_ptr(),
        None if readers is None else readers.data_ptr(),
        threads,
    )
    return grad_x, sums.sum(0).to(coefficients.dtype), grad_state


shift_cpu = differentiable(_forward, _backward)


def _sizes(x: Tensor, state: Tensor, coefficients: Tensor) -> tuple[int, ...]:
    """B, T, G, D, W, Q."""
    return (*x.shape, coefficients.shape[1], state.shape[0] * state.shape[1] // max(1, x.shape[0]))


def _rows(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), *x.stride()[:3])


def _state_rows(state: Tensor, x: Tensor) -> tuple[int, ...]:
    """(S, R, G, D) as (B, Q, G, D)."""
    row = x.shape[2] * x.shape[3]
    return (state.data_ptr(), state.shape[0] * state.shape[1] // max(1, x.shape[0]) * row, row, x.shape[3])


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _weights(coefficients: Tensor, x: Tensor) -> Tensor:
    return coefficients.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() >= _PARALLEL else 1


class _Kernels:
    """The functions of the kernel by dtype; `refusal` says why there are none."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.forward: dict[torch.dtype, Any] = {}
        self.backward: dict[torch.dtype, Any] = {}
        capability = torch.backends.cpu.get_cpu_capability()
        build, self.rows_per_sum = _BUILDS.get(capability, (capability, 0))
        path = Path(__file__).with_name(f"_kernel.{build}.so")
        if not path.exists():
            self.refusal = f"{path.name} was not built when kvshift was installed"
            return
        try:
            library = ctypes.CDLL(str(path))  # OpenMP is the one that torch has loaded: no second pool of threads
        except OSError as error:
            self.refusal = f"{path.name} does not load: {error}"
            return
        sizes = (_INT,) * 6
        for dtype, name in _DTYPES.items():
            forward = self.forward[dtype] = library[f"kvshift_forward_{name}"]
            forward.argtypes = (*sizes, _POINTER, *_ROWS, *_ROWS, _POINTER, _POINTER, ctypes.c_int)
            backward = self.backward[dtype] = library[f"kvshift_backward_{name}"]
            backward.argtypes = (
                *sizes, *(_POINTER,) * 4, _INT, *_ROWS, *_ROWS, *_ROWS, _POINTER, _POINTER, ctypes.c_int
            )  # fmt: skip
            forward.restype = backward.restype = None


@functools.cache
def _kernels() -> _Kernels:
    return _Kernels()
