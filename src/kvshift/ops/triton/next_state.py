"""Launches that make the next state, registered with torch.library: `kvshift::tails` and its gradients.

Shapes: B batch, T positions, S sequences, R rows of history, G KV heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvshift.ops.boundaries import plan_shift
from kvshift.ops.plain import gradients, next_history
from kvshift.ops.triton.launch import accumulator, kernels, on_device, power_of_2, sequences_of_a_tile, strides
from kvshift.ops.triton.registration import registered


def _like_gradients(
    gk_tail: Tensor, gv_tail: Tensor, k: Tensor, v: Tensor | None, k_past: Tensor | None, v_past: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(k.new_empty(0) if x is None else x.new_empty(x.shape) for x in (k, v, k_past, v_past))


@registered("tails_backward", fake=_like_gradients)
def tails_backward(
    gk_tail: Tensor,
    gv_tail: Tensor,
    k: Tensor,
    v: Tensor | None,
    k_past: Tensor | None,
    v_past: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    mask: Tensor | None,
    links: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, v, k_past and v_past, of which the shapes alone are looked at."""
    zeros = [k.new_zeros(0) if x is None else x.new_zeros(x.shape) for x in (k, v, k_past, v_past)]
    gk, gv, gk_past, gv_past = zeros
    _launch_tails(
        gk_tail.contiguous(),
        gv_tail.contiguous(),
        gk,
        None if v is None else gv,
        None if k_past is None else gk_past,
        None if v_past is None else gv_past,
        (cu_seqlens, seq_idx, mask, links),
        backward=True,
    )
    return gk, gv, gk_past, gv_past


def _like_tails(
    k: Tensor, v: Tensor | None, k_past: Tensor | None, v_past: Tensor | None, sequences: int, rows: int, *_: Any
) -> tuple[Tensor, Tensor]:
    k_tail = k.new_empty(sequences, rows, *k.shape[2:])
    return k_tail, k.new_empty(0) if v is None else v.new_empty(sequences, rows, *v.shape[2:])


def _save_shapes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    k, v, k_past, v_past, ctx.sequences, _, *bounds = inputs
    ctx.save_for_backward(k, v, k_past, v_past, *bounds)


def _backward_of_tails(ctx: Any, gk_tail: Tensor, gv_tail: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    gradients = tails_backward(gk_tail, gv_tail, *tensors)
    returned = (None if x is None else gradient for x, gradient in zip(tensors, gradients, strict=False))
    return (*returned, *(None,) * 6)


def _watched_backward(ctx: Any, gk_tail: Tensor, gv_tail: Tensor) -> tuple[Tensor | None, ...]:
    k, v, k_past, v_past, cu_seqlens, seq_idx, mask, _ = ctx.saved_tensors
    rows = gk_tail.shape[1]
    bounds = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "mask": mask}
    plan = None
    if any(bound is not None for bound in bounds.values()):
        plan = plan_shift(k.shape[0], k.shape[1], 1, rows, k.device, **bounds)

    def forward(k, v, k_past, v_past) -> tuple[Tensor, ...]:
        pairs = [(k, k_past)] if v is None else [(k, k_past), (v, v_past)]
        return tuple(
            next_history(x, x.new_zeros(ctx.sequences, rows, *x.shape[2:]) if past is None else past, plan, rows)
            for x, past in pairs
        )

    grads = (gk_tail,) if v is None else (gk_tail, gv_tail)
    return (*gradients(forward, (k, v, k_past, v_past), grads), *(None,) * 6)


@registered(
    "tails", fake=_like_tails, save=_save_shapes, backward=_backward_of_tails, watched_backward=_watched_backward
)
def tails(
    k: Tensor,
    v: Tensor | None,
    k_past: Tensor | None,
    v_past: Tensor | None,
    sequences: int,
    rows: int,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    mask: Tensor | None,
    links: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The next histories of k and v, (S, rows, G, D); for no v an empty tensor."""
    k_tail, v_tail = _like_tails(k, v, k_past, v_past, sequences, rows)
    _launch_tails(k_tail, v_tail, k, v, k_past, v_past, (cu_seqlens, seq_idx, mask, links), backward=False)
    return k_tail, v_tail


def _launch_tails(
    k_tail: Tensor,
    v_tail: Tensor,
    k: Tensor,
    v: Tensor | None,
    k_past: Tensor | None,
    v_past: Tensor | None,
    bounds: tuple[Tensor | None, ...],
    *,
    backward: bool,
) -> None:
    sequences, rows, heads, size = k_tail.shape
    lanes = heads if v is None else 2 * heads
    if sequences * rows * lanes == 0:
        return
    block_k, block_v = power_of_2(size), 1 if v is None else power_of_2(v.shape[3])
    block_s = sequences_of_a_tile(sequences, max(block_k, block_v))
    with on_device(k):
        kernels().tails[(-(-sequences // block_s) * lanes,)](
            k_tail, v_tail, k, v, k_past, v_past, *bounds,
            k.shape[1], heads, size, 0 if v is None else v.shape[3], 0 if k_past is None else k_past.shape[1], rows,
            sequences, lanes, *k.stride(), *strides(v),
            BACKWARD=backward, BLOCK_S=block_s, BLOCK_K=block_k, BLOCK_V=block_v, ACC=accumulator(k),
        )  # fmt: skip
