"""Launches that make the next state, registered with torch.library: `kvshift::next_state` and its gradients.

Shapes: B batch, T positions, S sequences, R rows of state, G KV heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvshift.ops.boundaries import plan_shift
from kvshift.ops.torch_ops import gradients, state_after
from kvshift.ops.triton.launch import accumulator, kernels, on_device, power_of_2, sequences_of_a_tile, strides
from kvshift.ops.triton.registration import registered


def _like_gradients(
    gk_next: Tensor,
    gv_next: Tensor,
    k: Tensor,
    v: Tensor | None,
    k_state: Tensor | None,
    v_state: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(k.new_empty(0) if x is None else x.new_empty(x.shape) for x in (k, v, k_state, v_state))


@registered("next_state_backward", fake=_like_gradients)
def next_state_backward(
    gk_next: Tensor,
    gv_next: Tensor,
    k: Tensor,
    v: Tensor | None,
    k_state: Tensor | None,
    v_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    mask: Tensor | None,
    links: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, v, k_state and v_state, of which the shapes alone are looked at."""
    zeros = [k.new_zeros(0) if x is None else x.new_zeros(x.shape) for x in (k, v, k_state, v_state)]
    gk, gv, gk_state, gv_state = zeros
    _launch_next_state(
        gk_next.contiguous(),
        gv_next.contiguous(),
        gk,
        None if v is None else gv,
        None if k_state is None else gk_state,
        None if v_state is None else gv_state,
        (cu_seqlens, seq_idx, mask, links),
        backward=True,
    )
    return gk, gv, gk_state, gv_state


def _like_next_state(
    k: Tensor, v: Tensor | None, k_state: Tensor | None, v_state: Tensor | None, sequences: int, rows: int, *_: Any
) -> tuple[Tensor, Tensor]:
    k_next = k.new_empty(sequences, rows, *k.shape[2:])
    return k_next, k.new_empty(0) if v is None else v.new_empty(sequences, rows, *v.shape[2:])


def _save_shapes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    k, v, k_state, v_state, ctx.sequences, _, *bounds = inputs
    ctx.save_for_backward(k, v, k_state, v_state, *bounds)


def _backward_of_next_state(ctx: Any, gk_next: Tensor, gv_next: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    gradients = next_state_backward(gk_next, gv_next, *tensors)
    returned = (None if x is None else gradient for x, gradient in zip(tensors, gradients, strict=False))
    return (*returned, *(None,) * 6)


def _watched_backward(ctx: Any, gk_next: Tensor, gv_next: Tensor) -> tuple[Tensor | None, ...]:
    k, v, k_state, v_state, cu_seqlens, seq_idx, mask, _ = ctx.saved_tensors
    rows = gk_next.shape[1]
    bounds = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "mask": mask}
    plan = None
    if any(bound is not None for bound in bounds.values()):
        plan = plan_shift(k.shape[0], k.shape[1], 1, rows, k.device, **bounds)

    def forward(k, v, k_state, v_state) -> tuple[Tensor, ...]:
        pairs = [(k, k_state)] if v is None else [(k, k_state), (v, v_state)]
        return tuple(
            state_after(x, x.new_zeros(ctx.sequences, rows, *x.shape[2:]) if state is None else state, plan, rows)
            for x, state in pairs
        )

    grads = (gk_next,) if v is None else (gk_next, gv_next)
    return (*gradients(forward, (k, v, k_state, v_state), grads), *(None,) * 6)


@registered(
    "next_state",
    fake=_like_next_state,
    save=_save_shapes,
    backward=_backward_of_next_state,
    watched_backward=_watched_backward,
)
def next_state(
    k: Tensor,
    v: Tensor | None,
    k_state: Tensor | None,
    v_state: Tensor | None,
    sequences: int,
    rows: int,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    mask: Tensor | None,
    links: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The next states of k and v, (S, rows, G, D); for no v an empty tensor."""
    k_next, v_next = _like_next_state(k, v, k_state, v_state, sequences, rows)
    _launch_next_state(k_next, v_next, k, v, k_state, v_state, (cu_seqlens, seq_idx, mask, links), backward=False)
    return k_next, v_next


def _launch_next_state(
    k_next: Tensor,
    v_next: Tensor,
    k: Tensor,
    v: Tensor | None,
    k_state: Tensor | None,
    v_state: Tensor | None,
    bounds: tuple[Tensor | None, ...],
    *,
    backward: bool,
) -> None:
    sequences, rows, heads, size = k_next.shape
    lanes = heads if v is None else 2 * heads
    if sequences * rows * lanes == 0:
        return
    block_k, block_v = power_of_2(size), 1 if v is None else power_of_2(v.shape[3])
    block_s = sequences_of_a_tile(sequences, max(block_k, block_v))
    with on_device(k):
        kernels().next_state[(-(-sequences // block_s) * lanes,)](
            k_next, v_next, k, v, k_state, v_state, *bounds,
            k.shape[1], heads, size, 0 if v is None else v.shape[3], 0 if k_state is None else k_state.shape[1], rows,
            sequences, lanes, *k.stride(), *strides(v),
            BACKWARD=backward, BLOCK_S=block_s, BLOCK_K=block_k, BLOCK_V=block_v, ACC=accumulator(k),
        )  # fmt: skip
