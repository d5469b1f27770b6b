"""The next token of generation in one launch; see `next_token_kernel.py`.

Shapes: B batch, H query heads, G KV heads, D head size, R tokens for which the cache has room.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from kvshift.ops.memory import PLAIN_TENSOR_TYPES, is_lazy
from kvshift.ops.triton.compiled_launch import CompiledLaunch, geometry

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def kernel() -> Any:
    """Return the kernel; importing it requires Triton."""
    from kvshift.ops.triton.next_token_kernel import next_token

    return next_token


class NextTokenLaunch:
    """Shifts, normalises and rotates the next token of each sequence, and writes it into one layer of a cache.

    It is made once for each layer of a cache, with the tensors that stay the same from token to token. Keys, values and
    states are overwritten in place.

    Args:
        keys, values: (B, G, R, D) and (B, G, R, Dv), contiguous: the cache, shifted and rotated.
        k_state, v_state: (B, 1, G, D) and (B, 1, G, Dv), contiguous: the raw previous token; None without a shift.
        alpha, beta: (G, 2) float32, contiguous; None if keys or values are not shifted.
        q_scale, k_scale: gains of the norms, (D,), contiguous; None without norms.
        eps: epsilon of the norms.
        length: int64 on the device, the number of tokens in a static cache, which each call increments. None: the
            position is an argument of the call.

    Raises:
        ValueError: the tensors are not as described.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        k_state: Tensor | None,
        v_state: Tensor | None,
        alpha: Tensor | None,
        beta: Tensor | None,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        eps: float = 0.0,
        *,
        length: Tensor | None = None,
    ) -> None:
        ticket = None if length is None else torch.zeros((), dtype=torch.int32, device=keys.device)
        batch, heads, self._room, size = keys.shape
        v_size = values.shape[3]
        of = keys.dtype
        described = {
            "keys": (keys, (batch, heads, self._room, size), of),
            "values": (values, (batch, heads, self._room, v_size), of),
            "k_state": (k_state, (batch, 1, heads, size), of),
            "v_state": (v_state, (batch, 1, heads, v_size), of),
            "alpha": (alpha, (heads, 2), torch.float32),
            "beta": (beta, (heads, 2), torch.float32),
            "q_scale": (q_scale, (size,), None),
            "k_scale": (k_scale, (size,), None),
            "length": (length, None, torch.int64),
        }
        for name, (x, shape, dtype) in described.items():
            problem = x is not None and _problem(x, shape, dtype, keys.device)
            if problem:
                raise ValueError(f"{name} {problem}")
        if of not in _DTYPES or size % 2 or not 0 < self._room < 2**31:
            raise ValueError(f"keys must be of 16 or 32 bits, with an even head size, got {tuple(keys.shape)} {of}")
        if (alpha is not None and k_state is None) or (beta is not None and v_state is None):
            raise ValueError("k_state and v_state must be given if keys or values are shifted")
        if (k_state is None) != (v_state is None) or (q_scale is None) != (k_scale is None):
            raise ValueError("k_state and v_state, and q_scale and k_scale, must be given together")
        self._cache = keys, values, k_state, v_state
        self._weights = alpha, beta
        self._last = q_scale, k_scale, length, ticket
        self._eps = eps
        self._counts_on_device = length is not None
        self._known: object = None
        self._launch: CompiledLaunch | None = None
        self._q_shape: tuple[int, ...] = ()
        self._strides: tuple[int, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, at: int) -> Tensor:
        """Compute the next token of every sequence.

        Args:
            q, k, v: as projected, (B, 1, H D), (B, 1, G D) and (B, 1, G Dv), or with separate heads, (B, 1, H, D), ...
            cos, sin: rotary tables of the token, as in `kvshift.ops.rope.Rotary`, (L, 1, 1, D) or (L, 1, 1, D/2).
            at: number of tokens in the cache before this one.

        Returns:
            q, (B, H, 1, D). Keys, values, states and `length` are updated in place.

        Raises:
            IndexError: the cache is full.
            ValueError: the tensors are not as described, or of another dtype or device than the cache.
        """
        if not 0 <= at < self._room:
            raise IndexError(f"the cache has room for {self._room} tokens, and holds {at} already")
        known = geometry(q), geometry(k), geometry(v), geometry(cos), geometry(sin)
        if self._launch is None or known != self._known:
            self._prepare(q, k, v, cos, sin)
            self._known = known
        q_out = q.new_empty(self._q_shape)
        tensors = q_out, *self._cache, q, k, v, *self._weights, cos, sin, *self._last
        self._launch(*tensors, numbers=(*self._strides, at, self._room))  # type: ignore[misc]  # prepared
        return q_out

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Check the tensors of a call and make the launch for all calls with tensors of the same geometry."""
        keys, values, *_ = self._cache
        batch, heads, _, size = keys.shape
        v_size = values.shape[3]
        for name, x, numbers in (("q", q, None), ("k", k, heads * size), ("v", v, heads * v_size)):
            width = x[0].numel() if x.ndim in (3, 4) and x.shape[0] == batch else 0
            if (
                type(x) not in PLAIN_TENSOR_TYPES
                or x.shape[1:2] != (1,)
                or width == 0
                or (width % size if numbers is None else width != numbers)
                or not x[:1].is_contiguous()
                or (x.ndim == 4 and x.shape[3] != (v_size if name == "v" else size))
            ):
                raise ValueError(
                    f"{name} must be ({batch}, 1, heads * head size), with adjacent heads, got {tuple(x.shape)} with "
                    f"strides {x.stride()}"
                )
            if x.dtype != keys.dtype or x.device != keys.device or is_lazy(x):
                raise ValueError(f"{name} must be {keys.dtype} on {keys.device}, got {x.dtype} on {x.device}")
        width = cos.shape[-1]
        for name, x in (("cos", cos), ("sin", sin)):
            problem = _problem(x, None, None, keys.device)
            if problem or x.shape not in ((1, 1, 1, width), (batch, 1, 1, width)) or width not in (size, size // 2):
                raise ValueError(f"{name} must be (1 or {batch}, 1, 1, {size} or {size // 2}), got {tuple(x.shape)}")
        if cos.shape != sin.shape:
            raise ValueError(f"cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}")
        queries = q[0].numel() // size
        self._q_shape = batch, queries, 1, size
        strides = q.stride(0), k.stride(0), v.stride(0), 0 if cos.shape[0] == 1 else cos.stride(0)
        align = math.gcd(16, *strides)
        self._strides = tuple(stride // align for stride in strides)
        constants = {
            "H": queries,
            "G": heads,
            "D": size,
            "Dv": v_size,
            "EPS": self._eps,
            "SIN": size // 2 if width == size else 0,
            "BLOCK_K": _power_of_2(size // 2),
            "BLOCK_V": _power_of_2(v_size),
            "ALIGN": align,
            "num_warps": 1,
        }
        self._launch = CompiledLaunch(kernel(), (queries + 2 * heads, batch), (), constants, q.get_device())


def _problem(x: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype | None, device: torch.device) -> str | None:
    """Return what is wrong with a tensor; None if nothing is."""
    expected = f"must be a contiguous {'' if dtype is None else dtype} tensor on {device}"
    if type(x) not in PLAIN_TENSOR_TYPES or x.layout is not torch.strided or is_lazy(x) or not x.is_contiguous():
        return f"{expected}, got a {type(x).__name__} with strides"
    if x.device != device or (dtype is not None and x.dtype != dtype) or (shape is not None and x.shape != shape):
        return f"{expected}{'' if shape is None else f', {shape}'}, got {tuple(x.shape)} {x.dtype} on {x.device}"
    return None


def _power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()
