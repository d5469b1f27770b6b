"""Launches of the kernels that shift, registered with torch.library: torch.compile and torch.export take them whole.

`kvshift::shift` is forward, for keys and values and, with a rotary embedding, queries; `kvshift::shift_backward` its
gradients.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvshift.ops.boundaries import plan_shift
from kvshift.ops.torch_ops import gradients, shift_norm_rope_traceable
from kvshift.ops.triton.registration import registered


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the work of a launch is cut; changes no result but by the order of the sums for coefficients and norms."""

    elements: int = 4096
    """Of a tile, at most: positions times the elements of a head. Half as many for a window above 2, for float64, for
    both with a window above 4, and for the gradient of a norm: what a thread needs must fit into its registers."""
    positions: int = 64
    """Of a tile, at most."""
    heads: int = 1
    """That one program works through, one after another; they share the rotary tables of their positions."""
    warps: int = 4
    """Of a program."""


# By kernel; `kvshift.benchmarks.tilings` tries others on the device at hand.
TILING = {
    "forward": Tiling(),
    "backward": Tiling(elements=2048),
    "forward, rotated": Tiling(elements=2048, heads=4),
    "backward, rotated": Tiling(elements=2048, heads=4),
}

# Of a tile at most, in the kernels of the state: a row each of several sequences.
ELEMENTS_OF_ROWS = 1024


@functools.cache
def kernels() -> SimpleNamespace:
    """The kernels; importing them takes Triton."""
    from kvshift.ops.triton import backward, forward

    return SimpleNamespace(
        forward=forward.forward,
        links=forward.links,
        next_state=forward.next_state,
        backward=backward.backward,
        backward_state=backward.backward_state,
    )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Of the arithmetic."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """The programs of a launch."""

    tiles: int  # of a batch entry
    q_lanes: int
    k_lanes: int
    v_lanes: int
    batch: int
    meta: dict[str, Any]

    @property
    def programs(self) -> int:
        return self.batch * self.tiles * (self.q_lanes + self.k_lanes + self.v_lanes)


def _grid(
    direction: str,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    *,
    rotated: bool,
    normed: bool,
) -> _Grid:
    tiling = TILING[f"{direction}, rotated" if rotated else direction]
    batch, positions, heads, size = k.shape
    block_k = power_of_2(size // 2 if rotated else size)
    block_v = power_of_2(v.shape[3])
    widest = max(block_k * (2 if rotated else 1), block_v)
    window = window_of(alpha, beta)
    wide = k.dtype == torch.float64
    halvings = (window > 2) + wide + (wide and window > 4) + (direction == "backward" and normed)
    block_t = min(power_of_2(positions), tiling.positions, max(1, (tiling.elements >> halvings) // widest))
    lanes = -(-heads // tiling.heads)
    return _Grid(
        tiles=-(-positions // block_t),
        q_lanes=0 if q is None else -(-q.shape[2] // tiling.heads),
        k_lanes=lanes if rotated or alpha is not None else 0,
        v_lanes=0 if beta is None else lanes,
        batch=batch,
        meta={
            "W": window,
            "HEADS": tiling.heads,
            "BLOCK_T": block_t,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "ACC": accumulator(k),
            "num_warps": tiling.warps,
        },
    )


def accumulator(x: Tensor) -> Any:
    """`compute_dtype` in Triton's words."""
    import triton.language as tl

    return tl.float64 if x.dtype == torch.float64 else tl.float32


def power_of_2(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def sequences_of_a_tile(sequences: int, widest: int) -> int:
    """Of the kernels that work on single rows of each sequence; `widest` is a head's block of elements."""
    return min(power_of_2(sequences), max(1, ELEMENTS_OF_ROWS // widest))


def window_of(*coefficients: Tensor | None) -> int:
    """W of those that there are, (G, W); 1 where nothing is shifted."""
    return next((x.shape[1] for x in coefficients if x is not None), 1)


def _sequences(k: Tensor, cu_seqlens: Tensor | None) -> int:
    return k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def strides(x: Tensor | None) -> tuple[int, ...]:
    """As a kernel takes them, for a tensor that may be absent."""
    return (0, 0, 0, 0) if x is None else x.stride()


def table_strides(cos: Tensor | None) -> tuple[int, int]:
    """Of batch entries and positions of a table (L, T, D/2), as a kernel takes them; sin has the same."""
    return (0, 0) if cos is None else (0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1))


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _like_links(mask: Tensor) -> Tensor:
    return mask.new_empty(*mask.shape, 2, dtype=torch.int32)


@registered("links", fake=_like_links)
def links(mask: Tensor) -> Tensor:
    """Of every position of (B, T) the real one before it and the one after: (B, T, 2), -1 and T where there is none."""
    found = _like_links(mask)
    if found.numel():
        batch, positions = mask.shape
        block = min(1024, power_of_2(positions))
        with on_device(mask):
            kernels().links[(batch,)](found, mask, positions, -(-positions // block), BLOCK=block)
    return found


def _like_gradients(
    gq_out: Tensor | None,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    k_state: Tensor | None,
    v_state: Tensor | None,
    cos: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
) -> list[Tensor]:
    """For the gradients of q, k, v, alpha, beta, k_state, v_state, q_scale, k_scale; no element where none is due."""
    shifted_k = None if alpha is None and cos is None else k
    shifted_v = None if beta is None else v
    due = (gq_out, shifted_k, shifted_v, alpha, beta, k_state, v_state, q_scale, k_scale)
    return [k.new_empty(0) if x is None else x.new_empty(x.shape) for x in due]


def _fake_gradients(
    gq_out, gk_out, gv_out, q, k, v, alpha, beta, k_state, v_state, cos, sin, q_scale, k_scale, *_: Any
) -> list[Tensor]:
    return _like_gradients(gq_out, k, v, alpha, beta, k_state, v_state, cos, q_scale, k_scale)


@registered("shift_backward", fake=_fake_gradients)
def shift_backward(
    gq_out: Tensor | None,
    gk_out: Tensor | None,
    gv_out: Tensor | None,
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
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    mask: Tensor | None,
    links: Tensor | None,
) -> list[Tensor]:
    """Gradients of q, k, v, alpha, beta, k_state, v_state, q_scale, k_scale; q is looked at only if there is a norm."""
    gradients = _like_gradients(gq_out, k, v, alpha, beta, k_state, v_state, cos, q_scale, k_scale)
    gq, gk, gv, galpha, gbeta, gk_state, gv_state, gq_scale, gk_scale = gradients
    grid = _grid("backward", gq_out, k, v, alpha, beta, rotated=cos is not None, normed=k_scale is not None)
    if grid.programs == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    sequences, (heads, window) = _sequences(k, cu_seqlens), (k.shape[2], grid.meta["W"])
    compute, tiles = compute_dtype(k), grid.batch * grid.tiles
    block_s = sequences_of_a_tile(sequences, max(grid.meta["BLOCK_K"], grid.meta["BLOCK_V"]))
    state_programs = 0 if k_state is None else -(-sequences // block_s) * (window - 1)
    # What each program gives to the coefficients; added up by one reduction, in one order.
    partials = torch.empty(2, tiles + state_programs, heads, window, dtype=compute, device=k.device)
    q_partials, k_partials = (
        None if scale is None else torch.empty(tiles * lanes, k.shape[3], dtype=compute, device=k.device)
        for scale, lanes in ((q_scale, grid.q_lanes), (k_scale, grid.k_lanes))
    )
    bounds = (cu_seqlens, seq_idx, mask, links)
    sizes = (k.shape[2], k.shape[3], v.shape[3])
    with on_device(k):
        kernels().backward[(grid.programs,)](
            gq, gk, gv, gq_out, gk_out, gv_out, q, k, v, alpha, beta, q_scale, k_scale,
            cos, sin, *table_strides(cos), partials[0], partials[1], q_partials, k_partials, *bounds,
            k.shape[1], grid.tiles, 0 if gq_out is None else gq_out.shape[2], *sizes, sequences, sequences.bit_length(),
            grid.q_lanes, grid.k_lanes, grid.v_lanes,
            *strides(gq_out), *strides(gk_out), *strides(gv_out), *strides(q), *k.stride(), *v.stride(),
            EPS=eps, **grid.meta,
        )  # fmt: skip
        if k_state is not None and state_programs:
            for state in (gk_state, gv_state):
                state.zero_()  # rows older than a window reads
            k_lanes, v_lanes = 0 if alpha is None else heads, 0 if beta is None else heads
            meta = {name: grid.meta[name] for name in ("W", "BLOCK_K", "BLOCK_V", "ACC")}
            kernels().backward_state[(state_programs * (k_lanes + v_lanes),)](
                gk_state, gv_state, gk_out, gv_out, alpha, beta, k_state, v_state, partials[0], partials[1], *bounds,
                k.shape[1], *sizes, k_state.shape[1], sequences, k_lanes, v_lanes, tiles,
                *strides(gk_out), *strides(gv_out), BLOCK_S=block_s, **meta,
            )  # fmt: skip
    sums = partials.sum(1)
    galpha = galpha if alpha is None else sums[0].clone()
    gbeta = gbeta if beta is None else sums[1].clone()
    gq_scale = gq_scale if q_partials is None else q_partials.sum(0).to(gq_scale.dtype)
    gk_scale = gk_scale if k_partials is None else k_partials.sum(0).to(gk_scale.dtype)
    return [gq, gk, gv, galpha, gbeta, gk_state, gv_state, gq_scale, gk_scale]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, alpha, beta, k_state, v_state, cos, sin, q_scale, k_scale, eps, *bounds = inputs
    ctx.has_q, ctx.eps = q is not None, eps
    kept_q = None if q_scale is None else q
    ctx.save_for_backward(kept_q, k, v, alpha, beta, k_state, v_state, cos, sin, q_scale, k_scale, *bounds)


def _backward(ctx: Any, gq_out: Tensor, gk_out: Tensor, gv_out: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, alpha, beta, k_state, v_state, cos, sin, q_scale, k_scale, *bounds = ctx.saved_tensors
    gq, gk, gv, galpha, gbeta, gk_state, gv_state, gq_scale, gk_scale = shift_backward(
        gq_out if ctx.has_q else None,
        gk_out if cos is not None or alpha is not None else None,
        gv_out if beta is not None else None,
        q, k, v, alpha, beta, k_state, v_state, cos, sin, q_scale, k_scale, ctx.eps, *bounds,
    )  # fmt: skip

    def of(x: Tensor | None, gradient: Tensor) -> Tensor | None:
        return None if x is None else gradient

    return (
        gq if ctx.has_q else None,
        gk if cos is not None or alpha is not None else None,
        of(beta, gv),
        of(alpha, galpha),
        of(beta, gbeta),
        of(k_state, gk_state),
        of(v_state, gv_state),
        None,
        None,
        of(q_scale, gq_scale),
        of(k_scale, gk_scale),
        *(None,) * 5,
    )


def _watched_backward(ctx: Any, gq_out: Tensor, gk_out: Tensor, gv_out: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, alpha, beta, k_state, v_state, cos, sin, q_scale, k_scale, cu_seqlens, seq_idx, mask, _ = ctx.saved_tensors
    if ctx.has_q and q is None:  # rotated alone: any numbers will do
        q = k.new_zeros(gq_out.shape)
    rows = window_of(alpha, beta) - 1 if k_state is None else k_state.shape[1]
    bounds = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "mask": mask}
    sources = None
    if any(bound is not None for bound in bounds.values()):
        sources = plan_shift(k.shape[0], k.shape[1], window_of(alpha, beta), rows, k.device, **bounds).sources
    sequences = _sequences(k, cu_seqlens)
    returned = (ctx.has_q, cos is not None or alpha is not None, beta is not None)

    def forward(q, k, v, alpha, beta, k_state, v_state, q_scale, k_scale) -> tuple[Tensor, ...]:
        outputs = shift_norm_rope_traceable(
            q, k, v, alpha, beta, k_state, v_state, cos, sin, q_scale, k_scale, ctx.eps, sources, sequences
        )
        return tuple(y for y, is_one in zip(outputs, returned, strict=True) if y is not None and is_one)

    inputs = (q, k, v, alpha, beta, k_state, v_state, q_scale, k_scale)
    grads = tuple(g for g, is_one in zip((gq_out, gk_out, gv_out), returned, strict=True) if is_one)
    *given, gq_scale, gk_scale = gradients(forward, inputs, grads)
    return (*given, None, None, gq_scale, gk_scale, *(None,) * 5)


def _like_outputs(
    q: Tensor | None, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, cos: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For the outputs; no element where there is nothing to compute."""
    nothing = k.new_empty
    return (
        nothing(0) if q is None else q.new_empty(q.shape),
        nothing(0) if alpha is None and cos is None else k.new_empty(k.shape),
        nothing(0) if beta is None else v.new_empty(v.shape),
    )


def _fake_outputs(q, k, v, alpha, beta, k_state, v_state, cos, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like_outputs(q, k, v, alpha, beta, cos)


@registered("shift", fake=_fake_outputs, save=_save_inputs, backward=_backward, watched_backward=_watched_backward)
def shift(
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
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    mask: Tensor | None,
    links: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs for q, k and v, as in `call.shift_norm_rope_triton`; with cos None, k and v are shifted alone.

    An empty tensor where there is nothing to compute: for no q, for k with neither alpha nor cos, for v without beta.
    """
    q_out, k_out, v_out = _like_outputs(q, k, v, alpha, beta, cos)
    grid = _grid("forward", q, k, v, alpha, beta, rotated=cos is not None, normed=k_scale is not None)
    if grid.programs == 0:
        return q_out, k_out, v_out
    sequences = _sequences(k, cu_seqlens)
    with on_device(k):
        kernels().forward[(grid.programs,)](
            q_out, k_out, v_out, q, k, v, alpha, beta, k_state, v_state, q_scale, k_scale,
            cos, sin, *table_strides(cos), cu_seqlens, seq_idx, mask, links,
            k.shape[1], grid.tiles, 0 if q is None else q.shape[2], k.shape[2], k.shape[3], v.shape[3],
            0 if k_state is None else k_state.shape[1], sequences, sequences.bit_length(),
            grid.q_lanes, grid.k_lanes, grid.v_lanes, *strides(q), *k.stride(), *v.stride(),
            EPS=eps, **grid.meta,
        )  # fmt: skip
    return q_out, k_out, v_out
