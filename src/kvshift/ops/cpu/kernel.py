"""The operator through the compiled kernel of `kernel.cpp`: one pass over memory forward, one backward.

The kernel is built when the package is installed (`hatch_build.py`). If it is missing or cannot take the tensors,
`cpu_unsupported_reason` returns the reason, and "auto" uses `torch_ops.shift_eager`, which computes the same bits.

Shapes: B batch, T positions, S sequences, R rows of state, Q rows of state per batch entry, G KV heads, D head
size, W window.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvshift.ops.arguments import compute_dtype
from kvshift.ops.memory import is_lazy, resolve, unreadable_reason
from kvshift.ops.torch_ops import make_differentiable, shift_eager_backward

_DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# By the CPU capability that torch reports: the compiler's name for it, and the number of rows whose gradients of
# coefficients are summed in float32 before these sums are added in float64 (half, where a vector has half the lanes).
_BUILDS = {"AVX512": ("x86-64-v4", 32), "AVX2": ("x86-64-v3", 16)}
_MAX_WINDOW = 16
_PARALLEL = 2**15  # number of elements from which a second thread pays off
_CPU = torch.device("cpu")
_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32


class _Rows(ctypes.Structure):
    """A tensor (B, rows, G, D) and its first three strides."""

    _fields_ = (("data", _POINTER), ("batch", _INT), ("row", _INT), ("head", _INT))


class _Call(ctypes.Structure):
    """The struct `Call` of kernel.cpp."""

    _fields_ = (
        *((name, _INT) for name in ("B", "T", "G", "D", "W", "Q", "threads")),
        ("x", _Rows), ("state", _Rows), ("weights", _POINTER), ("rows", _POINTER), ("y", _POINTER),
        ("kept", _POINTER), ("grad_y", _Rows), ("grad_x", _POINTER), ("grad_state", _POINTER),
        ("grad_weights", _POINTER), ("scratch", _POINTER), ("spans", _INT),
    )  # fmt: skip


def cpu_unsupported_reason(x: Tensor, window: int) -> str | None:
    """Return why the kernel cannot take x, a plain tensor; None if it can."""
    if torch.compiler.is_compiling():
        return "it does not support torch.compile, which generates its own code"
    if not x.is_cpu:
        return f"it runs on the CPU, the tensors are on {x.device}"
    if x.dtype not in _DTYPES:
        return f"it supports {', '.join(_DTYPES.values())}, the tensors are {x.dtype}"
    if window > _MAX_WINDOW:
        return f"it supports windows up to {_MAX_WINDOW}, got {window}"
    return _kernels().refusal


def _forward(x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    x, state, weights = _dense_heads(x), resolve(state).contiguous(), _weights(coefficients, x)
    call = _call(x, state, weights, sources)
    call.y = y.data_ptr()
    _kernels().forward[x.dtype](call)
    return y


def _backward(
    grad_y: Tensor, x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None, readers: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if not _are_readable(grad_y, x, coefficients, state, sources, readers):
        return shift_eager_backward(grad_y, x, coefficients, state, sources, readers)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    grad_state = torch.empty(state.shape, dtype=x.dtype, device="cpu")
    grad_y, x, state = _dense_heads(grad_y), _dense_heads(x), resolve(state).contiguous()
    weights = _weights(coefficients, x)
    call, kernels = _call(x, state, weights, readers), _kernels()
    call.spans = max(1, call.B * (call.Q + call.T) // kernels.rows_per_sum)
    sums = torch.empty(call.spans, *coefficients.shape, dtype=torch.float64, device="cpu")
    scratch = torch.empty(call.threads, *coefficients.shape, 128, dtype=torch.uint8, device="cpu")
    call.grad_y = _rows(grad_y)
    call.grad_x, call.grad_state = grad_x.data_ptr(), grad_state.data_ptr()
    call.grad_weights, call.scratch = sums.data_ptr(), scratch.data_ptr()
    kernels.backward[x.dtype](call)
    return grad_x, sums.sum(0).to(coefficients.dtype), grad_state


shift_cpu = make_differentiable(_forward, _backward)


class Pool:
    """`shift_cpu` for one row of tokens whose state is in a pool of rows, which it also updates. Without gradients.

    For servers: the record of a call is made once, and each call changes only the fields that vary, in one thread at a
    time. Making the record for every layer of every token would take the host longer than everything else.

    Args:
        coefficients: (G, W).
        size: D.
        dtype: dtype of the tokens and the pool.
    """

    def __init__(self, coefficients: Tensor, size: int, dtype: torch.dtype) -> None:
        heads, window = coefficients.shape
        self._weights = _weights(coefficients, torch.empty(0, dtype=dtype))  # kept alive, as the record has its address
        self._dtype = dtype
        self._function, self._numbers = _kernels().forward[dtype], heads * size
        self._call = _Call(B=1, G=heads, D=size, W=window, weights=self._weights.data_ptr())
        self._x, self._state = self._call.x, self._call.state  # views of the same memory
        self._x.head = self._state.head = size
        self._state.row = self._numbers

    def shift(self, x: Tensor, y: Tensor, pool: int, rows: int, sources: Tensor, kept: Tensor) -> None:
        """Shift the tokens, then write raw rows to the pool.

        Args:
            x: tokens, (>= T, G D), with contiguous rows.
            y: output, (>= T, G D), contiguous.
            pool: address of the first row of the pool, whose rows are contiguous.
            rows: number of rows of the pool.
            sources: (T, W), as in a `ShiftPlan` with the pool as the state.
            kept: row of the pool, counted from the first, that each token is written to, (T,) int32; negative for none.

        Raises:
            ValueError: a tensor cannot be read or written as described.
        """
        self._check(x, y, sources, kept)
        call, tokens = self._call, len(kept)
        call.T, call.Q, call.y = tokens, rows, y.data_ptr()
        call.threads = torch.get_num_threads() if tokens * self._numbers >= _PARALLEL else 1
        self._x.data, self._x.row, self._state.data = x.data_ptr(), x.stride(0), pool
        call.rows, call.kept = sources.data_ptr(), kept.data_ptr()
        self._function(call)

    def _check(self, x: Tensor, y: Tensor, sources: Tensor, kept: Tensor) -> None:
        for name, tensor, dtype in (
            ("x", x, self._dtype), ("y", y, self._dtype), ("sources", sources, torch.int32), ("kept", kept, torch.int32)
        ):  # fmt: skip
            reason = unreadable_reason(tensor, _CPU, dtype) or (
                "its memory holds other numbers" if is_lazy(tensor) else ""
            )
            if reason:
                raise ValueError(f"{name} cannot be used by the CPU kernel: {reason}")
        tokens = len(kept)
        if (
            not x.shape[1] == y.shape[1] == self._numbers
            or min(len(x), len(y)) < tokens
            or sources.numel() != tokens * self._call.W
            or x.stride(1) != 1
            or not (y.is_contiguous() and sources.is_contiguous() and kept.is_contiguous())
        ):
            raise ValueError(
                f"x and y must be rows of {self._numbers} numbers of {tokens} tokens or more, like kept, and y, "
                f"sources and kept must be contiguous; got x {tuple(x.shape)}, y {tuple(y.shape)}, "
                f"sources {tuple(sources.shape)}"
            )


def _call(x: Tensor, state: Tensor, weights: Tensor, rows: Tensor | None) -> _Call:
    slots = state.shape[0] * state.shape[1] // max(1, x.shape[0])  # Q
    size = x.shape[3]
    state_rows = _Rows(state.data_ptr(), slots * x.shape[2] * size, x.shape[2] * size, size)
    threads = torch.get_num_threads() if x.numel() >= _PARALLEL else 1
    pointer = None if rows is None else rows.data_ptr()
    return _Call(*x.shape, weights.shape[1], slots, threads, _rows(x), state_rows, weights.data_ptr(), pointer)


def _rows(x: Tensor) -> _Rows:
    return _Rows(x.data_ptr(), *x.stride()[:3])


def _are_readable(
    grad_y: Tensor, x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None, readers: Tensor | None
) -> bool:
    """Return True if backward may read these: a gradient may be of any type, and hooks may replace what was saved."""
    dtypes = (x.dtype, x.dtype, None, x.dtype, torch.int32, torch.int32)
    given = zip((grad_y, x, coefficients, state, sources, readers), dtypes, strict=True)
    return (
        all(tensor is None or unreadable_reason(tensor, _CPU, dtype) is None for tensor, dtype in given)
        and x.dtype in _DTYPES
        and x.shape == grad_y.shape
        and x.shape[2:] == state.shape[2:]
        and x.shape[2] == coefficients.shape[0]
        and all(rows is None or rows.is_contiguous() for rows in (sources, readers))
    )


def _dense_heads(x: Tensor) -> Tensor:
    x = resolve(x)
    return x if x.stride(3) == 1 else x.contiguous()


def _weights(coefficients: Tensor, x: Tensor) -> Tensor:
    return resolve(coefficients).to(compute_dtype(x)).contiguous()


class _Kernels:
    """The functions of the kernel by dtype. If there are none, `refusal` is the reason."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.forward: dict[torch.dtype, Any] = {}
        self.backward: dict[torch.dtype, Any] = {}
        self.next_token: dict[torch.dtype, Any] = {}  # see next_token.py
        capability = torch.backends.cpu.get_cpu_capability()
        build, self.rows_per_sum = _BUILDS.get(capability, (capability, 0))
        path = Path(__file__).with_name(f"_kernel.{build}.so")
        if not path.exists():
            self.refusal = f"{path.name} was not built when kvshift was installed"
            return
        try:
            library = ctypes.CDLL(str(path))  # shares torch's OpenMP: no second thread pool
        except OSError as error:
            self.refusal = f"{path.name} cannot be loaded: {error}"
            return
        built_from = _UINT.in_dll(library, "kvshift_sources").value if hasattr(library, "kvshift_sources") else None
        if built_from not in (0, _checksum(path.parent)):  # 0: not built by hatch_build.py
            self.refusal = f"{path.name} was built from other sources, as before an update: install kvshift again"
            warnings.warn(f"the CPU kernel is not used: {self.refusal}", stacklevel=2)
            return
        for dtype, name in _DTYPES.items():
            for direction, functions in (("forward", self.forward), ("backward", self.backward)):
                function = functions[dtype] = library[f"kvshift_{direction}_{name}"]
                function.argtypes, function.restype = (ctypes.POINTER(_Call),), None
        holding_the_lock = ctypes.PyDLL(str(path))  # of the interpreter: releasing it takes longer than a token
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            function = self.next_token[dtype] = holding_the_lock[f"kvshift_next_token_{_DTYPES[dtype]}"]
            function.argtypes = (*[_POINTER] * 6, _INT)
            function.restype = _INT


def _checksum(folder: Path) -> int:
    """Return the checksum of the kernel's sources, which is also in the binary that was built from them."""
    sources = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))
    return zlib.crc32(b"".join(path.read_bytes() for path in sources))


@functools.cache
def _kernels() -> _Kernels:
    return _Kernels()
