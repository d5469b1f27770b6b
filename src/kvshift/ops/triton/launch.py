"""Kernel launches, registered with torch.library, so that torch.compile and torch.export do not trace into them.

`kvshift::shift` computes keys, values, the next state and, with rotary embedding, queries; `kvshift::shift_backward`
computes the gradients.

Shapes: B batch, T positions, Q rows of state per batch entry, N rows of the next, H query heads, G KV heads, D head
size, W window.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvshift.ops.arguments import TENSORS, Call, compute_dtype
from kvshift.ops.torch_ops import gradients, gradients_of_state, shift_norm_rope_traceable
from kvshift.ops.triton.registration import register_operator


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the work of a launch is divided. Affects results only by the order of sums for coefficients and norms."""

    elements: int = 4096
    """Maximum number of elements of a tile: positions times the elements of a head. Halved for a window above 2, for
    float64, for both with a window above 4, and for the gradient of a norm, because a thread has few registers."""
    positions: int = 64
    """Maximum number of positions of a tile."""
    heads: int = 1
    """Number of heads that one program processes, one after another; they share the rotary tables of the positions."""
    warps: int = 4
    """Number of warps of a program."""


# The tiling of each kernel; `kvshift_lab.benchmarks.tilings` measures others on the current device.
TILING = {
    "forward": Tiling(),
    "backward": Tiling(elements=2048),
    "forward, rotated": Tiling(elements=2048, heads=4),
    "backward, rotated": Tiling(elements=2048, heads=4),
}


@functools.cache
def kernels() -> SimpleNamespace:
    """Return the kernels; importing them requires Triton."""
    from kvshift.ops.triton import backward, forward

    return SimpleNamespace(forward=forward.forward, backward=backward.backward)


# How a launch is cut --------------------------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """The programs of a launch, and the last of its arguments.

    Attributes:
        tiles: number of tiles of a batch entry.
        lanes: number of lanes of q, k and v together.
        sizes: tiles, lanes of q, k and v, strides of the rotary tables, and strides of all strided tensors.
        constants: compile-time constants.
    """

    tiles: int
    lanes: int
    sizes: list[int]
    constants: dict[str, Any]


def _grid(direction: str, x: Call, *strided: Tensor | None) -> _Grid:
    """Divide the work of a launch.

    Args:
        strided: the tensors that are read by their strides, starting with those for q, k and v.
    """
    rotated, normed = x.cos is not None, x.k_scale is not None
    tiling = TILING[f"{direction}, rotated" if rotated else direction]
    _, positions, _, size = x.k.shape
    v_size = 1 if x.v is None else x.v.shape[3]
    block_k, block_v = _power_of_2(size // 2 if rotated else size), _power_of_2(v_size)
    widest = max(block_k * (2 if rotated else 1), block_v)
    window, wide = x.window(), x.k.dtype == torch.float64
    halvings = (window > 2) + wide + (wide and window > 4) + (direction == "backward" and normed)
    block_t = min(_power_of_2(positions), tiling.positions, max(1, (tiling.elements >> halvings) // widest))
    tiles = -(-positions // block_t)
    lanes = [0 if y is None else -(-y.shape[2] // tiling.heads) for y in strided[:3]]
    # Strides, except within a head, are in units of a common divisor; sin has the strides of cos.
    align = math.gcd(16, *(stride for y in strided if y is not None for stride in y.stride()[:3]))
    strides = [(0, 0, 0, 0) if y is None else y.stride() for y in strided]
    table = (0, 0) if x.cos is None else (0 if x.cos.shape[0] == 1 else x.cos.stride(0), x.cos.stride(1))
    align_table = math.gcd(16, *table)
    sizes = [tiles, *lanes, *(stride // align_table for stride in table)]
    sizes += [stride for b, t, g, d in strides for stride in (b // align, t // align, g // align, d)]
    constants = {
        "Dk": size,
        "Dv": v_size,
        "W": window,
        "EPS": x.eps,
        "HEADS": tiling.heads,
        "BLOCK_T": block_t,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "ALIGN": align,
        "ALIGN_TABLE": align_table,
        "ACC": _accumulator(x.k),
        "num_warps": tiling.warps,
    }
    return _Grid(tiles, sum(lanes), sizes, constants)


def _accumulator(x: Tensor) -> Any:
    """Return `compute_dtype` as a Triton dtype."""
    import triton.language as tl

    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _rows_per_entry(x: Call) -> int:
    """Return Q, the number of rows of state of a batch entry, which for a pack is that of all sequences."""
    if x.k_state is None:
        return 0 if x.readers is None else x.readers.shape[1] - x.k.shape[1]
    return x.k_state.shape[0] * x.k_state.shape[1] // max(1, x.k.shape[0])


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the device of x current: Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


# The operators --------------------------------------------------------------------------------------------------------

# In the notation of torch.library.
_INPUTS = ", ".join(f"Tensor{'' if name == 'k' else '?'} {name}" for name in Call._fields[:TENSORS])


def _like(x: Tensor | None, k: Tensor, rows: int | None = None) -> Tensor:
    """Allocate an output like x, or with `rows` in place of its positions; empty if x is None."""
    if x is None:
        return k.new_empty(0)
    return x.new_empty(x.shape if rows is None else (x.shape[0], rows, *x.shape[2:]))


def _outputs(x: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return q, k and v, each as the template of its output; None if there is nothing to compute."""
    return x.q, None if x.alpha is None and x.cos is None else x.k, None if x.beta is None else x.v


def _like_outputs(x: Call, rows: int) -> tuple[Tensor, ...]:
    return *(_like(y, x.k) for y in _outputs(x)), *(_like(y, x.k, rows) for y in (x.k, x.v))


def _like_gradients(gq_out: Tensor | None, gk_out: Tensor | None, gv_out: Tensor | None, x: Call) -> list[Tensor]:
    """Allocate the gradients of q, k, v, alpha, beta, q_scale and k_scale."""
    due = (gq_out, None if gk_out is None else x.k, None if gv_out is None else x.v)
    return [_like(y, x.k) for y in (*due, x.alpha, x.beta, x.q_scale, x.k_scale)]


@register_operator(
    "shift_backward",
    schema=f"(Tensor? gq_out, Tensor? gk_out, Tensor? gv_out, {_INPUTS}, float eps) -> Tensor[]",
    fake=lambda gq_out, gk_out, gv_out, *args: _like_gradients(gq_out, gk_out, gv_out, Call(*args[:TENSORS])),
)
def _shift_backward(gq_out: Tensor | None, gk_out: Tensor | None, gv_out: Tensor | None, *args: Any) -> list[Tensor]:
    x = Call(*args[:TENSORS], eps=args[-1])
    gradients = _like_gradients(gq_out, gk_out, gv_out, x)
    gq, gk, gv, galpha, gbeta, gq_scale, gk_scale = gradients
    grid = _grid("backward", x, gq_out, gk_out, gv_out, x.q, x.k, x.v)
    tiles, heads, window = x.k.shape[0] * grid.tiles, x.k.shape[2], x.window()
    if tiles * grid.lanes == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients

    def partials(of: Tensor | None, *shape: int) -> Tensor | None:
        """Allocate the terms of the gradient of `of`, one per program; one reduction adds them in a fixed order."""
        return None if of is None else torch.empty(tiles, *shape, dtype=compute_dtype(x.k), device=x.k.device)

    k_sums, v_sums = partials(x.alpha, heads, window), partials(x.beta, heads, window)
    q_scale_sums, k_scale_sums = (
        partials(scale, lanes, x.k.shape[3])
        for scale, lanes in zip((x.q_scale, x.k_scale), grid.sizes[1:3], strict=True)
    )
    with _on_device(x.k):
        kernels().backward[(tiles * grid.lanes,)](
            gq, gk, gv, gq_out, gk_out, gv_out, k_sums, v_sums, q_scale_sums, k_scale_sums,
            x.q, x.k, x.v, x.alpha, x.beta, x.cos, x.sin, x.q_scale, x.k_scale, x.sources, x.readers,
            x.k.shape[1], 0 if gq_out is None else gq_out.shape[2], heads, _rows_per_entry(x), *grid.sizes,
            **grid.constants,
        )  # fmt: skip
    galpha, gbeta = (like if sums is None else sums.sum(0) for sums, like in ((k_sums, galpha), (v_sums, gbeta)))
    gq_scale, gk_scale = (
        like if sums is None else sums.sum((0, 1)).to(like.dtype)
        for sums, like in ((q_scale_sums, gq_scale), (k_scale_sums, gk_scale))
    )
    return [gq, gk, gv, galpha, gbeta, gq_scale, gk_scale]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x = Call(*inputs[:TENSORS])
    ctx.has_q, ctx.eps = x.q is not None, inputs[-2]
    ctx.save_for_backward(*x._replace(q=None if x.q_scale is None else x.q, next_state=None)[:TENSORS])


def _backward(ctx: Any, gq_out: Tensor, gk_out: Tensor, gv_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x = Call(*ctx.saved_tensors)
    due = (ctx.has_q, *(y is not None for y in _outputs(x)[1:]))  # q is saved only for a norm
    grads = [g if is_due else None for g, is_due in zip((gq_out, gk_out, gv_out), due, strict=True)]
    found = [g if g.numel() else None for g in _shift_backward(*grads, *x[:TENSORS], ctx.eps)]
    gq, gk, gv, galpha, gbeta, gq_scale, gk_scale = found
    gk_state = gv_state = None
    if x.k_state is not None and x.alpha is not None:
        gk_state, share = gradients_of_state(gk_out, x.alpha, x.k_state, x.readers)
        galpha = share if galpha is None else galpha + share
    if x.v_state is not None and x.beta is not None:
        gv_state, share = gradients_of_state(gv_out, x.beta, x.v_state, x.readers)
        gbeta = share if gbeta is None else gbeta + share
    return gq, gk, gv, galpha, gbeta, gk_state, gv_state, None, None, gq_scale, gk_scale, *(None,) * 5


def _traceable_backward(
    ctx: Any, gq_out: Tensor, gk_out: Tensor, gv_out: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    x = Call(*ctx.saved_tensors, eps=ctx.eps)
    if ctx.has_q and x.q is None:  # without a norm, its gradient does not depend on q
        x = x._replace(q=x.k.new_zeros(gq_out.shape))
    due = [y is not None for y in _outputs(x)]
    differentiable = [*x[:7], *x[9:11]]

    def forward(q, k, v, alpha, beta, k_state, v_state, q_scale, k_scale) -> tuple[Tensor, ...]:
        given = x._replace(q=q, k=k, v=v, alpha=alpha, beta=beta, k_state=k_state, v_state=v_state)
        outputs = shift_norm_rope_traceable(given._replace(q_scale=q_scale, k_scale=k_scale))
        return tuple(y for y, is_due in zip(outputs, due, strict=True) if y is not None and is_due)

    grads = tuple(g for g, is_due in zip((gq_out, gk_out, gv_out), due, strict=True) if is_due)
    *given, gq_scale, gk_scale = gradients(forward, differentiable, grads)
    return *given, None, None, gq_scale, gk_scale, *(None,) * 5


@register_operator(
    "shift",
    schema=f"({_INPUTS}, float eps, SymInt rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=lambda *args: _like_outputs(Call(*args[:TENSORS]), args[-1]),
    save=_save_inputs,
    backward=_backward,
    traceable_backward=_traceable_backward,
)
def _shift(*args: Any) -> tuple[Tensor, ...]:
    x, rows = Call(*args[:TENSORS], eps=args[-2]), args[-1]
    outputs = _like_outputs(x, rows)
    q_out, k_out, v_out = (y if like is not None else None for y, like in zip(outputs[:3], _outputs(x), strict=True))
    k_next, v_next = (y if rows and of is not None else None for y, of in zip(outputs[3:], (x.k, x.v), strict=True))
    k = x.k if k_out is not None or k_next is not None else None
    v = x.v if v_out is not None or v_next is not None else None
    grid = _grid("forward", x, x.q, k, v)
    batch, positions, heads, _ = x.k.shape
    programs = batch * (grid.tiles + (rows > 0)) * grid.lanes
    if programs:
        with _on_device(x.k):
            kernels().forward[(programs,)](
                q_out, k_out, v_out, k_next, v_next, *x[: TENSORS - 1],
                batch, positions, 0 if x.q is None else x.q.shape[2], heads, _rows_per_entry(x), rows, *grid.sizes,
                **grid.constants,
            )  # fmt: skip
    return outputs


def shift(x: Call, rows: int) -> tuple[Tensor, ...]:
    """Shift k and v, normalise and rotate q and k, and compute the next states, as far as `x` has the tensors.

        y = shift(k, alpha);  z = y / sqrt(mean(y^2) + eps) * k_scale;  k_out = (z1 cos - z2 sin, z2 cos + z1 sin)

    z1 and z2 are the halves of a head. Queries are treated in the same way without the shift; values are only shifted.
    All arithmetic is in float32 (float64 for float64). Only the first three results are differentiable.

    Args:
        x: a call whose tensors are contiguous, except q, k and v, with coefficients in the dtype of the arithmetic.
        rows: N, the number of rows of the next state of each batch entry; 0 if none is kept.

    Returns:
        q, k, v and the next states of k and v, (B, N, G, D). A result is an empty tensor if there is nothing to
        compute: q without a q, k with neither alpha nor cos, and v without beta.
    """
    return _shift(*x[:TENSORS], x.eps or 0.0, rows)
