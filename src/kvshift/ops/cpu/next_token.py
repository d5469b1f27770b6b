"""The next token of generation in one call of the compiled kernel: shift, QK-norm, rotation, state and cache.

The result has the bits of the separate operations in `kvshift.ops.decode`. What a call needs is prepared once for each
layer of a cache; then a token passes a few addresses. (An operator of torch.library would take as long, and would need
the ABI of one version of PyTorch.)

Shapes: B batch, H query heads, G KV heads, D head size, N rows of a cache. L is B, or 1 if all sequences share tables.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from kvshift.ops.arguments import Gains
from kvshift.ops.cpu.kernel import _CPU, _INT, _PARALLEL, _POINTER, _kernels, _Rows
from kvshift.ops.memory import is_lazy, unreadable_reason
from kvshift.ops.rope import Rotary
from kvshift.ops.state import ShiftState

MAX_SIZE = 1024  # of a head; `max_size` of next_token.h


class _Record(ctypes.Structure):
    """The struct `NextToken` of next_token.h."""

    _fields_ = (
        *((name, _INT) for name in ("B", "H", "G", "D", "Dv", "threads")),
        *((f"{name}_{axis}", _INT) for name in "qkv" for axis in ("batch", "head")),
        *((name, _Rows) for name in ("k_state", "v_state", "keys", "values")), ("room", _INT),
        *((name, _POINTER) for name in ("length", "alpha", "beta", "q_scale", "k_scale")), ("eps", ctypes.c_float),
    )  # fmt: skip


class _Tables(ctypes.Structure):
    """The struct `Tables` of next_token.h."""

    _fields_ = (("cos", _POINTER), ("sin", _POINTER), ("stride", _INT))


class TokenTables:
    """The rotary tables of one token, for all layers.

    Args:
        rotary: cosine and sine of transformers, (L, 1, D).

    Raises:
        ValueError: the kernel cannot read them.
    """

    __slots__ = ("_tables", "dtype", "reference", "rotary", "sequences", "size")

    def __init__(self, rotary: Rotary) -> None:
        cos, sin = rotary
        for table in rotary:
            reason = unreadable_reason(table, _CPU, cos.dtype)
            if reason is None and (table.shape != cos.shape or table.ndim != 3 or not table.is_contiguous()):
                reason = f"it takes contiguous tables (sequences, 1, size), got {tuple(table.shape)}"
            if reason is not None or is_lazy(table):
                raise ValueError(f"rotary tables cannot be read by the CPU kernel: {reason}")
        self.rotary, self.dtype = rotary, cos.dtype  # the tensors must live as long as the addresses
        self.sequences, self.size = cos.shape[0], cos.shape[2]
        self._tables = _Tables(cos.data_ptr(), sin.data_ptr(), 0 if self.sequences == 1 else self.size)
        self.reference = ctypes.byref(self._tables)


class NextToken:
    """The prepared calls for one layer of a cache.

    Args:
        q, k, v: projections of a token, (B, 1, H, D), (B, 1, G, D) and (B, 1, G, Dv), or their heads side by side, as
            (B, 1, H D). Later ones must be alike.
        state: the state before the token, with one row, which every call overwrites; None if nothing is shifted.
        alpha, beta: coefficients, (G, 2) in float32. If None, k or v is not shifted.
        gains: of the norms between shift and rotation, which compute Llama's formula.
        size: D; required only for heads side by side, whose values are of this size too.

    Attributes:
        buffers: the cache that calls write to, (B, G, N, D) and (B, G, N, Dv); None at first.
        k_address, v_address, length_address: where the buffers and the length are.
        length: the number of their rows in use, if calls count them.
        cached: for the caller: the part of the buffers in use.

    Raises:
        ValueError: the kernel does not support this; the message says why.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ShiftState | None,
        alpha: Tensor | None,
        beta: Tensor | None,
        gains: Gains = (None, None, 0.0),
        size: int = 0,
    ) -> None:
        self._inputs = [(x.shape, x.stride()) for x in (q, k, v)]
        q, k, v = (x.unflatten(2, (-1, size)) if x.ndim == 3 else x for x in (q, k, v))
        batch, _, heads, size = q.shape
        kv_heads, v_size = v.shape[2:]
        q_gain, k_gain, self.eps = gains
        self.state, self.dtype = state, q.dtype
        self.k_address = self.v_address = self.length_address = None
        self._refuse(q, k, v)
        rows = (None, None) if state is None else (state.k, state.v)
        addresses = [
            *(_address(name, x, (kv_heads, 2), torch.float32) for name, x in (("alpha", alpha), ("beta", beta))),
            *(_address("a gain", x, (size,), self.dtype) for x in (q_gain, k_gain)),
        ]
        self._coefficients: tuple[Any, ...] = (alpha, beta, torch.float32, *addresses[:2])
        self._gains: tuple[Any, ...] | None = None if q_gain is None else (q_gain, k_gain, self.dtype, *addresses[2:])
        if q_gain is not None and not sums_like_torch(size):
            raise ValueError(f"PyTorch sums {size} numbers in another order on this machine")
        k_rows, v_rows = (
            _Rows() if x is None else _Rows(_address(name, x, like.shape, self.dtype), *x.stride()[:3])
            for name, x, like in zip(("state.k", "state.v"), rows, (k, v), strict=True)
        )
        self._state_addresses = k_rows.data, v_rows.data
        strides = [stride for x in (q, k, v) for stride in (x.stride(0), x.stride(2))]
        self._record = _Record(
            batch, heads, kv_heads, size, v_size, 1, *strides, k_rows, v_rows, _Rows(), _Rows(), 0, None,
            *addresses, self.eps,
        )  # fmt: skip
        self._is_large = q.numel() + k.numel() + v.numel() >= _PARALLEL
        self._function, self._reference = _kernels().next_token[self.dtype], ctypes.byref(self._record)
        self._q_strides = (heads * size, size, size, 1)
        self._q_shape, self._kv_shape = (batch, heads, 1, size), (batch, kv_heads, size, v_size)
        self.buffers: Any = None
        self.cached: Any = None
        self.length: Tensor | None = None

    def is_current(
        self, state: ShiftState | None, coefficients: tuple[Tensor | None, Tensor | None], gains: Gains
    ) -> bool:
        """Return True if these are still the state, the coefficients and the gains, in the same memory."""
        if state is not self.state or not _are_same(coefficients[0], coefficients[1], *self._coefficients):
            return False
        if state is not None and (state.k.data_ptr(), state.v.data_ptr()) != self._state_addresses:
            return False
        if self._gains is None:
            return gains[0] is gains[1] is None
        return gains[2] == self.eps and _are_same(gains[0], gains[1], *self._gains)

    def takes(self, q: Tensor, k: Tensor, v: Tensor, tables: TokenTables) -> bool:
        """Return True if the projections are like those that the call was prepared for, and the tables fit."""
        dtype = self.dtype
        for x, (shape, stride) in zip((q, k, v), self._inputs, strict=True):
            if (
                x.shape != shape
                or x.stride() != stride
                or x.dtype is not dtype
                or type(x) is not Tensor
                or not x.is_cpu
                or x.is_neg()  # `is_lazy`, without the time for its call
                or x._is_zerotensor()
            ):
                return False
        batch, _, _, size = self._q_shape
        return tables.dtype is self.dtype and tables.size == size and tables.sequences in (1, batch)

    def write_to(self, keys: Tensor, values: Tensor, length: Tensor | None = None) -> bool:
        """Let later calls write to this cache; return False if it is not one that the kernel can write to.

        Args:
            keys: (B, G, N, D). values: (B, G, N, Dv).
            length: number of rows in use, one int64, which every call increments; None if the caller counts.
        """
        batch, kv_heads, *sizes = self._kv_shape
        if keys.ndim != 4:
            return False
        for x, size in zip((keys, values), sizes, strict=True):
            expected = (batch, kv_heads, keys.shape[2], size)
            if (
                unreadable_reason(x, _CPU, self.dtype) is not None
                or x.shape != expected
                or x.stride(3) != 1
                or any(step == 0 and length > 1 for step, length in zip(x.stride(), expected, strict=True))
                or is_lazy(x)
            ):
                return False
        if length is not None and (unreadable_reason(length, _CPU, torch.int64) is not None or length.numel() != 1):
            return False
        record = self._record
        for rows, x in ((record.keys, keys), (record.values, values)):
            rows.data, rows.batch, rows.row, rows.head = x.data_ptr(), x.stride(0), x.stride(2), x.stride(1)
        record.room = keys.shape[2]
        record.length = None if length is None else length.data_ptr()
        self.buffers, self.length = (keys, values), length
        self.k_address, self.v_address, self.length_address = record.keys.data, record.values.data, record.length
        return True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tables: TokenTables, at: int = 0) -> Tensor:
        """Shift, normalise and rotate a token that the call `takes`; write the cache and overwrite the state.

        Args:
            at: row of the cache to write to, unless a `length` counts them.

        Returns:
            q, (B, H, 1, D).

        Raises:
            IndexError: the cache has no such row. Nothing is written then.
        """
        if self._is_large:
            self._record.threads = torch.get_num_threads()
        out = q.new_empty_strided(self._q_shape, self._q_strides)  # (faster than `new_empty`)
        heads = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if self._function(self._reference, tables.reference, *heads, out.data_ptr(), at) < 0:
            raise IndexError(f"the cache is full: it has room for {self._record.room} tokens")
        return out

    def _refuse(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        kernels = _kernels()
        if kernels.refusal is not None or self.dtype not in kernels.next_token:
            raise ValueError(kernels.refusal or f"the kernel of the next token does not support {self.dtype}")
        (batch, _, _, size), (_, _, kv_heads, v_size) = q.shape, v.shape
        if size % 2 or max(size, v_size) > MAX_SIZE:
            raise ValueError(f"heads must be of an even size up to {MAX_SIZE}, got {size} and {v_size}")
        expected = ((batch, 1, q.shape[2], size), (batch, 1, kv_heads, size), (batch, 1, kv_heads, v_size))
        for name, x, shape in zip("qkv", (q, k, v), expected, strict=True):
            reason = unreadable_reason(x, _CPU, self.dtype)
            if reason is not None or x.shape != shape or x.stride(3) != 1:
                raise ValueError(f"{name}: {reason or f'it takes dense heads {shape}, got {tuple(x.shape)}'}")


def _are_same(
    x: Any, y: Any, known_x: Any, known_y: Any, dtype: torch.dtype, x_address: int | None, y_address: int | None
) -> bool:
    """Return True if x and y are the known tensors (or None), still dense, at these addresses and of this dtype."""
    if x is not known_x or y is not known_y:
        return False
    if x is not None and (x.data_ptr() != x_address or x.dtype is not dtype or not x.is_contiguous()):
        return False
    return y is None or (y.data_ptr() == y_address and y.dtype is dtype and y.is_contiguous())


def _address(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """Return the address of a contiguous tensor, or None if there is none."""
    if x is None:
        return None
    reason = unreadable_reason(x, _CPU, dtype)
    if reason is not None or x.shape != shape or not x.is_contiguous() or is_lazy(x):
        raise ValueError(f"{name}: {reason or f'it takes contiguous {shape}, got {tuple(x.shape)}'}")
    return x.data_ptr()


@functools.cache
def sums_like_torch(size: int) -> bool:
    """Return True if the kernel's norm has the bits of PyTorch's operations, which depend on the order of the sum."""
    heads, eps = 256, 1e-5
    plain: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    x = torch.randn(1, 1, heads, size, generator=torch.Generator().manual_seed(size), **plain)
    x *= torch.logspace(-3, 3, heads, **plain)[:, None]
    out, (gain, cos, sin) = torch.empty_like(x), torch.ones(3, size, **plain)
    sin.zero_()
    record = _Record(B=1, H=heads, D=size, threads=1, q_head=size, q_scale=gain.data_ptr(), room=1, eps=eps)
    tables = _Tables(cos.data_ptr(), sin.data_ptr(), 0)
    references = ctypes.byref(record), ctypes.byref(tables)
    _kernels().next_token[torch.float32](*references, x.data_ptr(), None, None, out.data_ptr(), 0)
    return torch.equal(out, x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def next_token_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes of tokens that the kernel takes; none if it was not built or cannot be loaded."""
    return tuple(_kernels().next_token)
