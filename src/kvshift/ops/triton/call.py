"""The operator through Triton: which calls it cannot take, and how the others are passed to `launch.py`.

Nothing synchronises with the device and no shape depends on data, so that CUDA graphs can capture it.

Shapes: B batch, T positions, S sequences, R rows of state, G KV heads, D head size, W window.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kvshift.ops.arguments import TENSORS, Call, compute_dtype
from kvshift.ops.torch_ops import state_after
from kvshift.ops.triton.compiled_launch import LaunchKey
from kvshift.ops.triton.launch import shift

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_WINDOW = 8
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then Triton runs kernels in Python, on CPU tensors


def has_triton() -> bool:
    """Return True if Triton is installed."""
    return _HAS_TRITON


def triton_unsupported_reason(x: Tensor, window: int) -> str | None:
    """Return why the kernels cannot take x, a plain or fake tensor; None if they can."""
    if x.dtype not in _DTYPES:
        return f"it supports {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}, the tensors are {x.dtype}"
    if window > _MAX_WINDOW:
        return f"it supports windows up to {_MAX_WINDOW}, got {window}"
    if not _HAS_TRITON:
        return "Triton is not installed"
    if not x.is_cuda and not (x.is_cpu and _IS_INTERPRETED):
        return f"it runs on CUDA devices (on the CPU in Triton's interpreter), the tensors are on {x.device}"
    return None


class _Known(NamedTuple):
    """How the kernels compute a call.

    Attributes:
        records: whether gradients are recorded.
        rows: number of rows of the next state of each sequence.
        in_launch: the same of each batch entry, if the launch writes them; otherwise 0.
        changes_layout: whether a tensor must be cast or copied first.
    """

    records: bool
    rows: int
    in_launch: int
    changes_layout: bool


def was_launched(key: LaunchKey | None) -> bool:
    """Return True if a call with this `kvshift.ops.dispatch.launch_key` was launched, so that it needs no checks."""
    return key is not None and key.known is not None


def shift_triton(
    x: Call, key: LaunchKey | None = None
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Prepare the tensors of a call for `kvshift.ops.triton.launch.shift`, and call it.

    Args:
        x: a call whose tensors have any strides, with its plan if there are boundaries.
        key: the `kvshift.ops.dispatch.launch_key` of the call.

    Returns:
        q, k, v, and the next states of k and v, (S, R, G, D). Tensors that are neither shifted nor rotated are returned
        unchanged; None for those that are absent or not kept.

    Raises:
        ValueError: gradients are recorded for a call that rotates and has a state.
    """
    known: _Known | None = None if key is None else key.known
    layout = x if known is not None and not known.changes_layout else _to_kernel_layout(x)
    if known is None:
        known = _how(x, changes_layout=any(y is not z for y, z in zip(x[:TENSORS], layout[:TENSORS], strict=True)))
    results = shift(layout, known.in_launch, key=key, records=known.records)
    if key is not None:
        key.known = known
    q, k, v, *next_rows = cast(tuple[Any, ...], results)
    in_launch, rows, max_rows = known.in_launch, known.rows, x.rows_to_keep()
    k_next = v_next = None
    if in_launch:
        k_next, v_next = next_rows
        if x.cu_seqlens is not None:
            k_next, v_next = (None if y is None else y.view(x.sequences(), rows, *y.shape[2:]) for y in next_rows)
    elif max_rows:
        k_next, v_next = _next_rows(x, x.k, x.k_state), _next_rows(x, x.v, x.v_state)
    k, v = x.k if x.alpha is x.cos is None else k, x.v if x.beta is None else v
    return None if x.q is None else q, k, v, k_next, v_next


def _how(x: Call, *, changes_layout: bool) -> _Known:
    records = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x[:TENSORS])
    if records and x.cos is not None and (x.k_state is not None or x.v_state is not None):
        raise ValueError("k_state and v_state must be None where gradients are recorded: a state has no gradient")
    rows, max_rows = x.rows(), x.rows_to_keep()
    if x.sources is None:
        rows = min(max_rows, rows + x.k.shape[1])
    in_launch = 0 if max_rows == 0 else rows if x.next_state is None else x.next_state.shape[1]
    if records and (torch.compiler.is_compiling() or x.sources is not None or x.k.shape[1] < rows):
        in_launch = 0  # its gradients are those of plain operations
    return _Known(records, rows, in_launch, changes_layout)


def _next_rows(x: Call, y: Tensor | None, state: Tensor | None) -> Tensor | None:
    """Return the next state of k or v by plain operations, through which gradients flow."""
    if y is None:
        return None
    return state_after(y, x.state_or_zeros(y, state), x.plan(), x.rows_to_keep())


def _to_kernel_layout(x: Call) -> Call:
    """Cast coefficients to the dtype of the arithmetic, make strides of both tables equal, and others contiguous."""
    cos, sin, compute = x.cos, x.sin, compute_dtype(x.k)
    if cos is not None and sin is not None and not _have_equal_strides(cos, sin):
        cos, sin = cos.contiguous(), sin.contiguous()
    return x._replace(
        cos=cos,
        sin=sin,
        alpha=_dense(x.alpha, compute),
        beta=_dense(x.beta, compute),
        k_state=_dense(x.k_state),
        v_state=_dense(x.v_state),
        q_scale=_dense(x.q_scale),
        k_scale=_dense(x.k_scale),
    )


def _dense(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return x as a contiguous tensor, of this dtype if one is given. (`to` costs a call even if it does nothing.)"""
    if x is None:
        return None
    return (x if dtype is None or x.dtype is dtype else x.to(dtype)).contiguous()


def _have_equal_strides(cos: Tensor, sin: Tensor) -> bool:
    return cos.stride(2) == 1 and cos.stride() == sin.stride() and cos.dtype == sin.dtype
