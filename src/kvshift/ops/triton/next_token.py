"""The next token of generation in one launch; see `next_token_kernel.py`.

What a launch needs is prepared once for each layer of a cache; then a token passes a few addresses.

Shapes: B batch, H query heads, G KV heads, D head size, N rows of a cache. L is B, or 1 if all sequences share tables.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from kvshift.ops.arguments import Gains
from kvshift.ops.memory import PLAIN_TENSOR_TYPES, is_lazy, unreadable_reason
from kvshift.ops.rope import Rotary
from kvshift.ops.state import ShiftState
from kvshift.ops.triton.call import has_triton, triton_unsupported_reason
from kvshift.ops.triton.compiled_launch import CompiledLaunch, geometry

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_SIZE = 1024  # of a head, in one program of one warp
_MAX_ROWS = 2**31 - 1


@functools.cache
def kernel() -> Any:
    """Return the kernel; importing it requires Triton."""
    from kvshift.ops.triton.next_token_kernel import next_token

    return next_token


class TokenTables:
    """The rotary tables of one token, for all layers.

    Args:
        rotary: cosine and sine, (L, 1, 1, D), as in `kvshift.ops.rope.rotate_half`, or half as wide.

    Raises:
        ValueError: the kernel cannot read them.
    """

    __slots__ = ("addresses", "geometry", "rotary", "sequences", "size")

    def __init__(self, rotary: Rotary) -> None:
        cos, sin = rotary
        for name, table in (("cos", cos), ("sin", sin)):
            reason = unreadable_reason(table, cos.device)
            if reason is None and (table.shape != cos.shape or table.ndim != 4 or table.shape[1:3] != (1, 1)):
                reason = f"it takes tables (sequences, 1, 1, size), got {tuple(table.shape)}"
            if reason is None and (table.stride(3) != 1 or table.stride() != cos.stride()):
                reason = f"it takes dense rows, got strides {cos.stride()} and {table.stride()}"
            if reason is not None or is_lazy(table):
                raise ValueError(f"{name} cannot be read by the Triton kernel: {reason}")
        self.rotary, self.geometry = rotary, geometry(cos)
        self.addresses = cos.data_ptr(), sin.data_ptr()
        self.sequences, self.size = cos.shape[0], cos.shape[3]


class NextToken:
    """The prepared launches for one layer of a cache.

    Args:
        q, k, v: projections of a token, (B, 1, H, D), (B, 1, G, D) and (B, 1, G, Dv); later ones must be alike.
        state: the state before the token, with one row, which every launch overwrites; None if nothing is shifted.
        alpha, beta: coefficients, (G, 2) in float32. If None, k or v is not shifted.
        gains: of the norms between shift and rotation, which compute Llama's formula.

    Attributes:
        buffers: the cache that launches write to, (B, G, N, D) and (B, G, N, Dv); None at first.
        k_address, v_address, length_address: where the buffers and the length are.
        length: the number of its rows in use, if launches count them.
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
    ) -> None:
        batch, _, heads, size = q.shape
        kv_heads, v_size = v.shape[2:]
        q_gain, k_gain, self.eps = gains
        self.state, self.tensors, self.dtype = state, (alpha, beta, q_gain, k_gain), q.dtype
        refusal = triton_unsupported_reason(q, 2)
        if refusal is not None or q.dtype not in _DTYPES:
            raise ValueError(refusal or f"the kernel of the next token does not support {q.dtype}")
        if size % 2 or max(size, v_size) > _MAX_SIZE:
            raise ValueError(f"heads must be of an even size up to {_MAX_SIZE}, got {size} and {v_size}")
        expected = (batch, 1, heads, size), (batch, 1, kv_heads, size), (batch, 1, kv_heads, v_size)
        for name, x, shape in zip("qkv", (q, k, v), expected, strict=True):
            reason = _problem(x, shape, q.dtype, q.device)
            if reason is not None or not x[:1].is_contiguous():
                raise ValueError(f"{name}: {reason or f'it takes adjacent heads, got strides {x.stride()}'}")
        if state is None and not alpha is beta is None:
            raise ValueError("state must be given if keys or values are shifted")
        rows = (None, None) if state is None else (state.k, state.v)
        for name, x, shape, dtype in (
            ("alpha", alpha, (kv_heads, 2), torch.float32), ("beta", beta, (kv_heads, 2), torch.float32),
            ("state.k", rows[0], k.shape, q.dtype), ("state.v", rows[1], v.shape, q.dtype),
            ("a gain", q_gain, (size,), None), ("a gain", k_gain, (size,), None),
        ):  # fmt: skip
            reason = None if x is None else _problem(x, shape, dtype, q.device)
            if reason is not None or (x is not None and not x.is_contiguous()):
                raise ValueError(f"{name}: {reason or 'it takes a contiguous tensor'}")
        self._rows = rows
        self._state_addresses = tuple(0 if x is None else x.data_ptr() for x in rows)
        self.k_address = self.v_address = self.length_address = None
        self._known = [(None, None, 0) if x is None else (x, x.dtype, x.data_ptr()) for x in self.tensors]
        self._inputs = _geometries(q, k, v)
        self._strides = q.stride(0), k.stride(0), v.stride(0)
        self._shapes = (batch, heads, 1, size), (batch, kv_heads, v_size)
        self._like_out = q.new_empty(self._shapes[0])  # `empty_like` is faster than `new_empty`
        self._device = q.get_device()
        self._of_launch: object = None
        self._launch: Any = None
        self._ticket: Tensor | None = None
        self.buffers: Any = None
        self.cached: Any = None
        self.length: Tensor | None = None

    def is_current(
        self, state: ShiftState | None, coefficients: tuple[Tensor | None, Tensor | None], gains: Gains
    ) -> bool:
        """Return True if these are still the state, the coefficients and the gains, in the same memory."""
        if state is not self.state or gains[2] != self.eps:
            return False
        if state is not None and (state.k.data_ptr(), state.v.data_ptr()) != self._state_addresses:
            return False
        for x, (known, dtype, address) in zip((*coefficients, *gains[:2]), self._known, strict=True):
            if x is not known:
                return False
            if x is not None and (x.dtype is not dtype or x.data_ptr() != address or not x.is_contiguous()):
                return False
        return True

    def takes(self, q: Tensor, k: Tensor, v: Tensor, tables: TokenTables) -> bool:
        """Return True if the projections are like those that this was prepared for, and the tables fit."""
        if not type(q) is type(k) is type(v) is Tensor or is_lazy(q) or is_lazy(k) or is_lazy(v):
            return False
        if _geometries(q, k, v) != self._inputs:
            return False
        batch, _, _, size = self._shapes[0]
        return tables.sequences in (1, batch) and tables.size in (size, size // 2)

    def write_to(self, keys: Tensor, values: Tensor, length: Tensor | None = None) -> bool:
        """Let later launches write to this cache; return False if it is not one that the kernel can write to.

        Args:
            keys: (B, G, N, D), contiguous. values: (B, G, N, Dv).
            length: number of rows in use, one int64, which every launch increments; None if the caller counts.
        """
        (batch, _, _, size), (_, heads, v_size) = self._shapes
        rows = keys.shape[2] if keys.ndim == 4 else 0
        for x, width in ((keys, size), (values, v_size)):
            reason = _problem(x, (batch, heads, rows, width), self.dtype, keys.device)
            if reason is not None or not x.is_contiguous() or x.get_device() != self._device or rows > _MAX_ROWS:
                return False
        if length is not None:
            if _problem(length, None, torch.int64, keys.device) is not None or length.numel() != 1:
                return False
            if self._ticket is None:
                self._ticket = torch.zeros((), dtype=torch.int32, device=keys.device)
        self.buffers, self.length, self._room = (keys, values), length, rows
        self._fixed = keys, values, *self._rows, *self.tensors, length, None if length is None else self._ticket
        self._addresses = [0 if x is None else x.data_ptr() for x in self._fixed]
        self.k_address, self.v_address = keys.data_ptr(), values.data_ptr()
        self.length_address = None if length is None else length.data_ptr()
        return True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tables: TokenTables, at: int = 0) -> Tensor:
        """Shift, normalise and rotate a token that this `takes`; write the cache and overwrite the state.

        Args:
            at: number of tokens in the cache, and index of the row to write to, unless a `length` counts them.

        Returns:
            q, (B, H, 1, D).

        Raises:
            IndexError: the cache has no such row. (Of a `length` that is too large the host does not know; the kernel
                writes nothing then.)
        """
        if not 0 <= at < self._room:
            raise IndexError(f"the cache is full: it has room for {self._room} tokens, and holds {at}")
        of_launch = tables.geometry, self.length is None
        if of_launch != self._of_launch:
            self._prepare(tables)
            self._of_launch = of_launch
        out = torch.empty_like(self._like_out)
        addresses = out.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), *tables.addresses, *self._addresses
        self._launch((out, q, k, v, *tables.rotary, *self._fixed), (at, self._room), addresses)
        return out

    def _prepare(self, tables: TokenTables) -> None:
        """Make the launch for tables of this geometry."""
        (batch, heads, _, size), (_, kv_heads, v_size) = self._shapes
        strides = *self._strides, 0 if tables.sequences == 1 else tables.rotary[0].stride(0)
        align = math.gcd(16, *strides)
        constants = {
            "H": heads,
            "G": kv_heads,
            "D": size,
            "Dv": v_size,
            "EPS": self.eps,
            "SIN": size // 2 if tables.size == size else 0,
            "BLOCK_K": 1 << max(0, size // 2 - 1).bit_length(),
            "BLOCK_V": 1 << max(0, v_size - 1).bit_length(),
            "ALIGN": align,
            "num_warps": 1,
        }
        grid, numbers = (heads + 2 * kv_heads, batch), tuple(stride // align for stride in strides)
        self._launch = CompiledLaunch(kernel(), grid, numbers, constants, self._device)


def next_token_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes of tokens that the kernel takes; none without Triton."""
    return _DTYPES if has_triton() else ()


def _geometries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return the `geometry` of all three, in one flat tuple."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(),
    )  # fmt: skip


def _problem(x: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype | None, device: torch.device) -> str | None:
    """Return why the kernel cannot read or write a tensor at its address; None if it can."""
    reason = unreadable_reason(x, device, dtype, PLAIN_TENSOR_TYPES)
    if reason is None and shape is not None and x.shape != shape:
        reason = f"it must be {tuple(shape)}, got {tuple(x.shape)}"
    return "its memory does not hold its numbers" if reason is None and is_lazy(x) else reason
