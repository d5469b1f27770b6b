"""Kernel launches, registered with torch.library, so that torch.compile and torch.export do not trace into them.

`kvshift::shift` computes keys, values, the next state and, with rotary embedding, queries; `kvshift::shift_backward`
computes the gradients.

Shapes: B batch, T positions, Q rows of state per batch entry, N rows of the next, H query heads, G KV heads, D head
size, W window.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kvshift.ops.arguments import TENSORS, Call, compute_dtype
from kvshift.ops.torch_ops import gradients, gradients_of_state, shift_norm_rope_traceable
from kvshift.ops.triton.compiled_launch import CompiledLaunch, Kept, LaunchKey, geometry
from kvshift.ops.triton.registration import Operator


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


# The tiling of each kernel; `benchmarks/tilings.py` measures others on the current device.
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
    import triton.language as tl

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
        "ACC": tl.float64 if wide else tl.float32,
        "num_warps": tiling.warps,
    }
    return _Grid(tiles, sum(lanes), sizes, constants)


def _power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _rows_per_entry(x: Call) -> int:
    """Return Q, the number of rows of state of a batch entry, which for a pack is that of all sequences."""
    if x.k_state is None:
        return 0 if x.readers is None else x.readers.shape[1] - x.k.shape[1]
    return x.k_state.shape[0] * x.k_state.shape[1] // max(1, x.k.shape[0])


# The operators --------------------------------------------------------------------------------------------------------

# In the notation of torch.library.
_INPUTS = ", ".join(f"Tensor{'' if name == 'k' else '?'} {name}" for name in Call._fields[:TENSORS])

Shape = Sequence[int]
Layout = tuple[Shape, Shape]  # shape and strides, because `new_empty_strided` is faster than `new_empty`


class _Prepared(NamedTuple):
    """What follows from the geometry of a call's tensors.

    Attributes:
        results: what to allocate for the results that have the dtype of k; None for those that are absent.
        partials: the same for the partial sums of the gradients of alpha, beta, q_scale and k_scale.
        launch: None if there is nothing to compute.
    """

    results: list[Layout | None]
    partials: list[Layout | None]
    launch: CompiledLaunch | None


_FORWARD: Kept[_Prepared] = Kept()
_BACKWARD: Kept[_Prepared] = Kept()


def _shape(x: Tensor | None, rows: int | None = None) -> Shape | None:
    """Return the shape of x, or that with `rows` in place of its positions."""
    return x if x is None else x.shape if rows is None else (x.shape[0], rows, *x.shape[2:])


def _layout(shape: Shape | None) -> Layout | None:
    """Return this shape with the strides of a contiguous tensor."""
    return None if shape is None else (shape, torch.empty(shape, device="meta").stride())


def _allocate(layouts: Iterable[Layout | None], like: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
    return [None if layout is None else like.new_empty_strided(*layout, dtype=dtype) for layout in layouts]


def _launch(kernel: Any, programs: int, grid: _Grid, x: Call, *numbers: int) -> CompiledLaunch | None:
    if programs == 0:
        return None
    return CompiledLaunch(kernel, (programs,), (*numbers, *grid.sizes), grid.constants, x.k.get_device())


def _outputs(x: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return q, k and v, each as the template of its output; None if there is nothing to compute."""
    return x.q, None if x.alpha is None and x.cos is None else x.k, None if x.beta is None else x.v


def _forward_results(x: Call, rows: int) -> list[Shape | None]:
    next_rows = (x.k, x.v) if rows else (None, None)
    return [*map(_shape, _outputs(x)), *(_shape(y, rows) for y in next_rows)]


def _gradients(grads: Sequence[Tensor | None], x: Call) -> list[Tensor | None]:
    """Return templates of the gradients of q, k, v, alpha, beta, q_scale and k_scale: their shapes and dtypes."""
    gq_out, gk_out, gv_out = grads
    due = (gq_out, None if gk_out is None else x.k, None if gv_out is None else x.v)
    return [*due, x.alpha, x.beta, x.q_scale, x.k_scale]


def _empty_like(shapes: list[Shape | None], x: Call) -> list[Tensor]:
    """Return the results of an operator without computing them; empty ones in place of those that are absent."""
    return [x.k.new_empty(0 if shape is None else shape) for shape in shapes]


def _prepare_backward(kernel: Any, grads: tuple[Tensor | None, ...], x: Call) -> _Prepared:
    gq_out, gk_out, gv_out = grads
    grid = _grid("backward", x, gq_out, gk_out, gv_out, x.q, x.k, x.v)
    _, positions, heads, size = x.k.shape
    tiles = x.k.shape[0] * grid.tiles
    # The terms of each gradient, one per program; one reduction adds them in a fixed order.
    coefficients = [None if y is None else (tiles, heads, x.window()) for y in (x.alpha, x.beta)]
    gains = [
        None if y is None else (tiles, lanes, size)
        for y, lanes in zip((x.q_scale, x.k_scale), grid.sizes[1:3], strict=True)
    ]
    numbers = positions, 0 if gq_out is None else gq_out.shape[2], heads, _rows_per_entry(x)
    launch = _launch(kernel, tiles * grid.lanes, grid, x, *numbers)
    results, partials = map(_shape, _gradients(grads, x)[:3]), (*coefficients, *gains)
    return _Prepared([*map(_layout, results)], [*map(_layout, partials)], launch)


def _launch_backward(*args: Any) -> list[Tensor | None]:
    grads, (q, k, v, alpha, beta, _, _, cos, sin, q_scale, k_scale, sources, _, readers) = args[:3], args[3:-1]
    kernel, tiling = kernels().backward, TILING["backward" if cos is None else "backward, rotated"]
    key = (id(kernel), tiling, args[-1], *map(geometry, args[:-1]))
    prepared = _BACKWARD.get(key)
    if prepared is None:
        prepared = _BACKWARD[key] = _prepare_backward(kernel, grads, Call(*args[3:-1], eps=args[-1]))
    if prepared.launch is None:
        return [None if x is None else torch.zeros_like(x) for x in _gradients(grads, Call(*args[3:-1]))]
    gradients = _allocate(prepared.results, k, k.dtype)
    sums = _allocate(prepared.partials, k, compute_dtype(k))
    inputs = q, k, v, alpha, beta, cos, sin, q_scale, k_scale, sources, readers
    prepared.launch((*gradients, *grads, *sums, *inputs))
    k_sums, v_sums, *gain_sums = sums
    of_coefficients = [None if x is None else x.sum(0) for x in (k_sums, v_sums)]
    of_gains = [
        None if x is None else x.sum((0, 1)).to(gain.dtype)
        for x, gain in zip(gain_sums, (q_scale, k_scale), strict=True)
    ]
    return [*gradients, *of_coefficients, *of_gains]


def _fake_gradients(*args: Any) -> list[Tensor]:
    x = Call(*args[3:-1])
    return [x.k.new_empty(0) if y is None else y.new_empty(y.shape) for y in _gradients(args[:3], x)]


_shift_backward = Operator(
    "shift_backward",
    cast(Any, _launch_backward),
    schema=f"(Tensor? gq_out, Tensor? gk_out, Tensor? gv_out, {_INPUTS}, float eps) -> Tensor[]",
    fake=_fake_gradients,
)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, q_scale, readers = inputs[0], inputs[9], inputs[TENSORS - 1]
    ctx.q_shape, ctx.eps = _shape(q), inputs[TENSORS]
    ctx.arguments = len(inputs)
    ctx.save_for_backward(None if q_scale is None else q, *inputs[1 : TENSORS - 2], None, readers)  # no `next_state`
    # The next states depend on k and v alone, not on the coefficients.
    constant = [
        y for y, needed in zip(output[3:], ctx.needs_input_grad[1:3], strict=True) if y is not None and not needed
    ]
    if constant:
        ctx.mark_non_differentiable(*constant)


def _due(ctx: Any, x: Call, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of all results: zeros for a q, k or v that nothing depends on, None for what is absent."""
    shapes = (ctx.q_shape, *map(_shape, _outputs(x)[1:]))  # q is saved only for a norm
    for grad in grads:
        if grad is not None and grad.layout is not torch.strided:
            raise NotImplementedError(f"the kernels take dense gradients, got one of layout {grad.layout}")
    of_states = [None if grad is None or grad.numel() == 0 else grad for grad in grads[3:]]
    return [
        None if shape is None else x.k.new_zeros(shape) if grad is None else grad
        for shape, grad in zip(shapes, grads, strict=False)
    ] + of_states


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    x = Call(*ctx.saved_tensors)
    *grads, k_rows, v_rows = _due(ctx, x, given)
    found = _shift_backward(*grads, *x[:TENSORS], ctx.eps)
    gq, gk, gv, galpha, gbeta, gq_scale, gk_scale = (None if g is None or g.numel() == 0 else g for g in found)
    gk, gv = _add_to_last_rows(gk, x.k, k_rows), _add_to_last_rows(gv, x.v, v_rows)
    gk_state = gv_state = None
    if x.k_state is not None and x.alpha is not None:
        gk_state, share = gradients_of_state(cast(Tensor, grads[1]), x.alpha, x.k_state, x.readers)
        galpha = share if galpha is None else galpha + share
    if x.v_state is not None and x.beta is not None:
        gv_state, share = gradients_of_state(cast(Tensor, grads[2]), x.beta, x.v_state, x.readers)
        gbeta = share if gbeta is None else gbeta + share
    found = gq, gk, gv, galpha, gbeta, gk_state, gv_state, None, None, gq_scale, gk_scale
    return *found, *(None,) * (ctx.arguments - len(found))


def _last_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return as many of the last rows of x as there are in `rows`."""
    return x[:, x.shape[1] - rows.shape[1] :]


def _add_to_last_rows(g: Tensor | None, x: Tensor | None, of_state: Tensor | None) -> Tensor | None:
    """Add the gradient of the next state, which holds the last rows of x, to the gradient of x."""
    if of_state is None or x is None:
        return g
    g = torch.zeros_like(x) if g is None else g
    _last_rows(g, of_state).add_(of_state)
    return g


def _traceable_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x = Call(*ctx.saved_tensors, eps=ctx.eps)
    given = _due(ctx, x, grads)
    if ctx.q_shape is not None and x.q is None:  # without a norm, its gradient does not depend on q
        x = x._replace(q=x.k.new_zeros(ctx.q_shape))
    differentiable = [*x[:7], *x[9:11]]

    def forward(q, k, v, alpha, beta, k_state, v_state, q_scale, k_scale) -> tuple[Tensor, ...]:
        call = x._replace(q=q, k=k, v=v, alpha=alpha, beta=beta, k_state=k_state, v_state=v_state)
        outputs = shift_norm_rope_traceable(call._replace(q_scale=q_scale, k_scale=k_scale))
        rows = [None if grad is None else _last_rows(y, grad) for y, grad in zip((k, v), given[3:], strict=True)]
        outputs = *outputs, *rows
        return tuple(y for y, grad in zip(outputs, given, strict=True) if y is not None and grad is not None)

    *found, gq_scale, gk_scale = gradients(forward, differentiable, tuple(g for g in given if g is not None))
    found += None, None, gq_scale, gk_scale
    return *found, *(None,) * (ctx.arguments - len(found))


def _prepare_forward(kernel: Any, x: Call, rows: int) -> _Prepared:
    results = _forward_results(x, rows)
    k, v = (
        None if out is None and next_rows is None else y
        for y, out, next_rows in zip((x.k, x.v), results[1:3], results[3:], strict=True)
    )
    grid = _grid("forward", x, x.q, k, v)
    batch, positions, heads, _ = x.k.shape
    numbers = batch, positions, 0 if x.q is None else x.q.shape[2], heads, _rows_per_entry(x), rows
    return _Prepared(
        [*map(_layout, results)], [], _launch(kernel, batch * (grid.tiles + (rows > 0)) * grid.lanes, grid, x, *numbers)
    )


def _launch_forward(*args: Any) -> tuple[Tensor | None, ...]:
    inputs, (eps, rows), key = args[:TENSORS], args[TENSORS : TENSORS + 2], args[TENSORS + 2 :]
    kernel, tiling = kernels().forward, TILING["forward" if inputs[7] is None else "forward, rotated"]
    key = (id(kernel), tiling, eps, rows, key or tuple(map(geometry, inputs)))
    prepared = _FORWARD.get(key)
    if prepared is None:
        prepared = _FORWARD[key] = _prepare_forward(kernel, Call(*inputs, eps=eps), rows)
    results = _allocate(prepared.results, inputs[1], inputs[1].dtype)
    if prepared.launch is not None:
        prepared.launch((*results, *inputs[:-1]))
    return tuple(results)


_shift = Operator(
    "shift",
    _launch_forward,
    schema=f"({_INPUTS}, float eps, SymInt rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=lambda *args: tuple(_empty_like(_forward_results(Call(*args[:TENSORS]), args[-1]), Call(*args[:TENSORS]))),
    save=_save_inputs,
    backward=_backward,
    traceable_backward=_traceable_backward,
)


def shift(x: Call, rows: int, *, key: LaunchKey | None = None, records: bool = False) -> tuple[Tensor | None, ...]:
    """Shift k and v, normalise and rotate q and k, and compute the next states, as far as `x` has the tensors.

        y = shift(k, alpha);  z = y / sqrt(mean(y^2) + eps) * k_scale;  k_out = (z1 cos - z2 sin, z2 cos + z1 sin)

    z1 and z2 are the halves of a head. Queries are treated in the same way without the shift; values are only shifted.
    All arithmetic is in float32 (float64 for float64). The next states are differentiable only without boundaries, and
    if all their rows are rows of k and v.

    Args:
        x: a call whose tensors are contiguous, except q, k and v, with coefficients in the dtype of the arithmetic.
        rows: N, the number of rows of the next state of each batch entry; 0 if none is kept.
        key: what identifies the geometry of all tensors, if they are known to be plain and not lazy, and nothing
            records operators.
        records: whether gradients are recorded; needed only with a key.

    Returns:
        q, k, v and the next states of k and v, (B, N, G, D). A result is None (an empty tensor where the operators of
        torch.library are called) if there is nothing to compute: q without a q, k with neither alpha nor cos, v without
        beta, and states without rows.
    """
    args = *x[:TENSORS], x.eps or 0.0, rows
    if key is None:
        return _shift(*args)
    return cast(Any, _shift.differentiable)(*args, key) if records else _shift.launch(*args, key)
