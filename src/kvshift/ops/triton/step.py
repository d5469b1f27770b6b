"""Decoding: one token of every sequence in one launch, `kvshift::step`, for static shapes and CUDA graphs.

Shapes: B batch, R rows of state, H query heads, G KV heads, D head size, W window, P pages, N rows of a page.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvshift.ops.triton.call import aligned_tables
from kvshift.ops.triton.launch import (
    accumulator,
    compute_dtype,
    kernels,
    on_device,
    power_of_2,
    table_strides,
    window_of,
)
from kvshift.ops.triton.registration import registered

_HEADS = 4  # of q, k or v that one program works through


def step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_state: Tensor,
    v_state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    state_slots: Tensor | None = None,
    cache_slots: Tensor,
    own_pages: bool = False,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """What `shift_norm_rope_triton` does to one token of every sequence; keys and values go into the cache, in place.

        k_cache[slot // N, slot % N] = rotated(norm(alpha[:, 0] k + alpha[:, 1] k_state[state_slot, -1] + ...))
        k_state[state_slot] = (k_state[state_slot, 1:], k)                                     and the same for v

    No gradients. A row whose state slot is negative is left alone, as those are with which a batch is filled up for a
    CUDA graph; one whose cache slot is negative writes its state alone.

    Args:
        q: (B, 1, H, D), k: (B, 1, G, D), v: (B, 1, G, Dv).
        alpha, beta: (G, W), or None: not shifted.
        cos, sin: (L, 1, D/2), L = 1 or B.
        k_state, v_state: (slots, R, G, D), contiguous, R >= W - 1: the raw rows before the token; changed.
        k_cache, v_cache: (P, N, G, D), D contiguous; changed.
        state_slots: (B,) integers, no two alike but the negative ones; None: row b has slot b.
        cache_slots: (B,) integers, or one for all: where in the cache the token goes, page after page.
        own_pages: row b has page b, and `cache_slots` count within it. A token behind its end is written nowhere.
        q_scale, k_scale, eps: of the QK-norm, as in `shift_norm_rope_triton`.

    Returns:
        q, rotated, (B, 1, H, D); zero where the state slot is negative, NaN where the page of its row is full.

    Raises:
        ValueError: a tensor has the wrong shape or strides; the message names it.
    """
    batch, (heads, size) = q.shape[0], k.shape[2:]
    rows = max(1, window_of(alpha, beta) - 1)
    _check(q, q.ndim == 4 and q.shape[1] == 1 and q.shape[3] == size, "q must be (batch, 1, heads, {})", size)
    for name, x, state, cache in (("k", k, k_state, k_cache), ("v", v, v_state, v_cache)):
        _check(x, x.shape[:3] == (batch, 1, heads), "{} must be ({}, 1, {}, head size)", name, batch, heads)
        _check(
            state,
            state.ndim == 4 and state.shape[1] >= rows and state.shape[2:] == x.shape[2:] and state.is_contiguous(),
            "{}_state must be (slots, rows, {}, {}), contiguous, with at least {} rows",
            *(name, heads, x.shape[3], rows),
        )
        _check(
            cache,
            cache.ndim == 4 and cache.shape[2:] == x.shape[2:] and cache.stride(3) == 1,
            "{}_cache must be (pages, rows, {}, {}) with the elements of a head side by side",
            *(name, heads, x.shape[3]),
        )
    _check(v_state, v_state.shape[:2] == k_state.shape[:2], "v_state must have as many rows as k_state")
    _check(v_cache, v_cache.shape[:2] == k_cache.shape[:2], "v_cache must have the pages of k_cache")
    _check(cos, cos.shape[1:] == (1, size // 2), "cos must be (1 or {}, 1, {})", batch, size // 2)
    slots = k_state.shape[0] >= batch if state_slots is None else state_slots.shape == (batch,)
    _check(k_state, slots, "state_slots must be ({},), or None for as many states", batch)
    _check(cache_slots, cache_slots.numel() in (1, batch), "cache_slots must be ({},) or a single one", batch)
    compute = compute_dtype(k)
    coefficients = [x if x is None else x.to(compute).contiguous() for x in (alpha, beta)]
    table = aligned_tables(cos, sin)
    return _step(
        q, k, v, *coefficients, *table, k_state, v_state, k_cache, v_cache, state_slots, cache_slots, own_pages,
        q_scale, k_scale, eps,
    )  # fmt: skip


def _check(x: Tensor, holds: bool, rule: str, *numbers: object) -> None:
    if not holds:  # put into words only then: decoding waits for every microsecond
        raise ValueError(f"{rule.format(*numbers)}; got {tuple(x.shape)} with strides {x.stride()}")


def _like_q(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


@registered("step", fake=_like_q, mutates=("k_state", "v_state", "k_cache", "v_cache"))
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_state: Tensor,
    v_state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    state_slots: Tensor | None,
    cache_slots: Tensor,
    own_pages: bool,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    eps: float,
) -> Tensor:
    q_out = _like_q(q)
    (batch, _, heads, size), queries = k.shape, q.shape[2]
    lanes = -(-heads // _HEADS)
    q_lanes = -(-queries // _HEADS)
    programs = batch * (q_lanes + 2 * lanes)
    if programs == 0:
        return q_out
    with on_device(k):
        kernels().step[(programs,)](
            q_out, k_cache, v_cache, k_state, v_state, q, k, v, alpha, beta, q_scale, k_scale,
            cos, sin, *table_strides(cos), state_slots, cache_slots,
            0 if cache_slots.numel() == 1 else cache_slots.stride(0), k_cache.shape[1], queries,
            heads, size, v.shape[3], k_state.shape[1], q_lanes, lanes, lanes,
            *_heads(q), *_heads(k), *_heads(v), *k_cache.stride()[:3], *v_cache.stride()[:3],
            OWN_PAGES=own_pages, W=window_of(alpha, beta), HEADS=_HEADS, BLOCK_K=power_of_2(size // 2),
            BLOCK_V=power_of_2(v.shape[3]), STATE_K=power_of_2(size), EPS=eps, ACC=accumulator(k), num_warps=1,
        )  # fmt: skip
    return q_out


def _heads(x: Tensor) -> Sequence[int]:
    """The strides of batch, heads and elements."""
    return x.stride(0), x.stride(2), x.stride(3)
