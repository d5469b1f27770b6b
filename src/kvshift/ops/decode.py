"""The next token of generation in a few plain operations, bit-identical to `kv_shift`.

This is for what `kvshift.models.next_token` does not compute in one call. On every device, the host takes longer to
prepare a launch from the arguments of a layer than to call these operations. They handle one token per sequence, with
a window of 2 and no gradients. The row of state is the previous token:

    k_hat = alpha[:, 0] * k + alpha[:, 1] * state.k          v_hat = beta[:, 0] * v + beta[:, 1] * state.v

Shapes: G KV heads, W window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvshift.ops.arguments import Call, compute_dtype
from kvshift.ops.rope import apply_rotary
from kvshift.ops.state import ShiftState


def next_token(call: Call, cache: CoefficientCache) -> tuple[Tensor | None, Tensor, Tensor, ShiftState | None]:
    """Shift, normalise and rotate the next token of every sequence.

    Args:
        call: a call for which `kvshift.ops.dispatch.fused_path` returns "next token".
        cache: cache of the layer's coefficients.

    Returns:
        q, k, v and the new state, which shares memory with the keys and values of the call.
    """
    q: Any
    v: Any
    q, k, v, rotary, new = call.q, call.k, call.v, call.rotary(), None
    if call.alpha is not None or call.beta is not None:
        new = None if call.max_rows == 0 else ShiftState(k, v, 1)
        dtype = compute_dtype(k)
        if call.alpha is not None:
            k = _shift_one(k, call.k_state, cache.columns(0, call.alpha, dtype))
        if call.beta is not None:
            v = _shift_one(v, call.v_state, cache.columns(1, call.beta, dtype))
    if call.norms is not None:
        q, k = call.norms[0](q), call.norms[1](k)
    if rotary is None:
        return q, k, v, new
    # Rotated together, which saves four operations.
    q, k = torch.split_with_sizes(apply_rotary(torch.cat((q, k), 2), rotary), (q.shape[2], k.shape[2]), 2)
    return q, k, v, new


def _shift_one(x: Tensor, previous: Any, columns: Columns) -> Tensor:
    """Return the shifted keys or values, given those of the previous token."""
    y = x * columns.current  # in the dtype of the arithmetic
    if columns.none_is_zero:
        # Operations convert their arguments and results themselves; `to` would be another launch for each.
        return torch.addcmul(y, previous, columns.previous, out=y if y.dtype is x.dtype else torch.empty_like(x))
    y.masked_fill_(columns.current == 0, 0)
    return torch.where(columns.previous == 0, y, torch.addcmul(y, previous, columns.previous)).to(x.dtype)


class Columns(NamedTuple):
    """The columns of coefficients (G, 2), in the form that the next token needs.

    Attributes:
        current, previous: coefficients of the token and of the previous one, (G, 1) views.
        none_is_zero: True if all are known to be nonzero. (A row whose coefficient is zero must not be read.)
    """

    current: Tensor
    previous: Tensor
    none_is_zero: bool


def make_columns(coefficients: Tensor, *, find_zeros: bool) -> Columns:
    """Return the columns; if `find_zeros`, search for zeros, which takes 1 us on a CPU and synchronises elsewhere."""
    current, previous = coefficients.unsqueeze(2).unbind(1)
    return Columns(current, previous, find_zeros and all(map(all, coefficients.tolist())))


class CoefficientCache:
    """Caches the columns of a layer's parameters between tokens, because computing them takes as long as the shift.

    Caching also saves the synchronisation with the device for the search for zeros. (A zero written through `.data`,
    which does not change the version counter, is multiplied like other numbers until the next change.)
    """

    def __init__(self) -> None:
        self._cached: list[tuple[Tensor | None, int, Any, int, torch.dtype, Columns] | None] = [None, None]

    def columns(self, index: int, x: Tensor, dtype: torch.dtype) -> Columns:
        """Return the columns of alpha (`index` 0) or beta (`index` 1) in this dtype."""
        # A captured graph must stay valid for other values: nothing is read or cached.
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        cached = self._cached[index]
        if cached is not None and not captured:
            parameter, address, strides, version, of_dtype, columns = cached
            is_there = x is parameter and x.data_ptr() == address and x.stride() == strides
            if is_there and x._version == version and dtype is of_dtype:
                return columns
        keeps = type(x) is nn.Parameter and x.dtype is dtype and not (captured or x.is_inference() or x.is_meta)
        columns = make_columns(x.to(dtype), find_zeros=keeps or x.is_cpu)
        if keeps:
            self._cached[index] = (x, x.data_ptr(), x.stride(), x._version, dtype, columns)
        return columns
