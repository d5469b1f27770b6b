"""The operator through Triton: what it refuses, and how a call becomes one of `launch.py`.

Nothing waits for the device and no shape depends on data, so that CUDA graphs can be made of it.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvshift.ops.triton.launch import compute_dtype, links, shift
from kvshift.ops.triton.next_state import next_state

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_WINDOW = 8
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then Triton runs kernels as Python, on CPU tensors


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """Padding and documents, as in `kv_shift`, in the form that the kernels read."""

    cu_seqlens: Tensor | None = None
    seq_idx: Tensor | None = None
    mask: Tensor | None = None
    links: Tensor | None = None
    """(B, T, 2) int32, the real position before and the one after; -1 and T where there is none."""

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, seq_idx: Tensor | None, mask: Tensor | None) -> Boundaries:
        """Of the tensors that `kv_shift` takes."""
        cu_seqlens, seq_idx, mask = (x if x is None else x.contiguous() for x in (cu_seqlens, seq_idx, mask))
        return cls(cu_seqlens=cu_seqlens, seq_idx=seq_idx, mask=mask, links=None if mask is None else links(mask))

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.cu_seqlens, self.seq_idx, self.mask, self.links


def triton_refusal(x: Tensor, window: int) -> str | None:
    """Why the kernels cannot take x, a plain tensor or a fake one; None if they can."""
    if x.dtype not in _DTYPES:
        return f"it knows {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}, the tensors are {x.dtype}"
    if window > _MAX_WINDOW:
        return f"its window is {_MAX_WINDOW} at most, got {window}"
    if not _HAS_TRITON:
        return "Triton is not installed"
    if not x.is_cuda and not (x.is_cpu and _IS_INTERPRETED):
        return f"it runs on CUDA devices (on the CPU in Triton's interpreter), the tensors are on {x.device}"
    return None


def shift_triton(
    inputs: Sequence[Tensor],
    coefficients: Sequence[Tensor | None],
    states: Sequence[Tensor | None],
    boundaries: Boundaries,
) -> list[Tensor]:
    """Shift one or two tensors that share their boundaries, as `kvshift.ops.shift._shift`."""
    k, v = inputs[0], inputs[-1]
    alpha, beta = coefficients[0], coefficients[1] if len(coefficients) > 1 else None
    k_state, v_state = states[0], states[1] if len(states) > 1 else None
    not_rotated = (None, None, None, None, 0.0)
    _, k_hat, v_hat = _shift(None, k, v, alpha, beta, k_state, v_state, *not_rotated, boundaries=boundaries)
    return [x if own is None else y for x, own, y in zip(inputs, coefficients, (k_hat, v_hat), strict=False)]


def next_state_triton(
    k: Tensor,
    v: Tensor | None,
    k_state: Tensor | None,
    v_state: Tensor | None,
    sequences: int,
    window: int,
    max_rows: int,
    boundaries: Boundaries,
) -> list[Tensor]:
    """The next states of k and, where there is one, of v."""
    rows = window - 1 if k_state is None else k_state.shape[1]
    if boundaries.cu_seqlens is None and boundaries.seq_idx is None and boundaries.mask is None:
        rows = min(max_rows, rows + k.shape[1])
    states = [None if state is None else state.contiguous() for state in (k_state, v_state)]
    states = next_state(k, v, *states, sequences, rows, *boundaries.tensors())
    return list(states[: 1 if v is None else 2])


def shift_norm_rope_triton(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    eps: float = 0.0,
    k_state: Tensor | None = None,
    v_state: Tensor | None = None,
    boundaries: Boundaries | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift keys and values, normalise and rotate queries and keys, in one launch.

        y = shift(k, alpha);  z = y / sqrt(mean(y^2) + eps) * k_scale;  k_out = (z1 cos - z2 sin, z2 cos + z1 sin)

    z1 and z2 are the halves of a head. Queries the same without shift; values are shifted alone. Everything between
    input and output is in float32 (float64 for float64).

    Args:
        q: (B, T, H, D), or None; k: (B, T, G, D), v: (B, T, G, Dv).
        alpha, beta: (G, W), or None: not shifted.
        cos, sin: (L, T, D/2), L = 1 or B.
        q_scale, k_scale: (D,), both or None: without norm.
        eps: of the norm.
        k_state, v_state: states, (S, R, G, D); without gradients alone.
        boundaries: padding and documents.

    Returns:
        q, k and v as attention takes them; for no q an empty tensor.

    Raises:
        ValueError: gradients are to be recorded, and there are states.
    """
    trained = any(x is not None and x.requires_grad for x in (q, k, v, alpha, beta, q_scale, k_scale))
    if (k_state is not None or v_state is not None) and trained and torch.is_grad_enabled():
        raise ValueError("k_state and v_state must be None where gradients are recorded: none flows through a state")
    found = boundaries or Boundaries()
    table = _aligned_tables(cos, sin)
    q_out, k_out, v_out = _shift(
        q, k, v, alpha, beta, k_state, v_state, *table, q_scale, k_scale, eps, boundaries=found
    )
    return q_out, k_out, v if beta is None else v_out


def _aligned_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """With the same strides, those of a row side by side, as the kernels read them."""
    if cos.stride(2) == 1 and cos.stride() == sin.stride() and cos.dtype == sin.dtype:
        return cos, sin
    return cos.contiguous(), sin.contiguous()


def _shift(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    k_state: Tensor | None,
    v_state: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    eps: float,
    *,
    boundaries: Boundaries,
) -> tuple[Tensor, Tensor, Tensor]:
    compute = compute_dtype(k)
    coefficients = [x if x is None else x.to(compute).contiguous() for x in (alpha, beta)]
    states = [x if x is None else x.contiguous() for x in (k_state, v_state)]
    scales = [x if x is None else x.contiguous() for x in (q_scale, k_scale)]
    return shift(q, k, v, *coefficients, *states, cos, sin, *scales, eps, *boundaries.tensors())
