"""One token of every sequence: shift, QK-norm, rotation, the write into the cache and the next state, in one launch.

Shapes: B batch, R rows of state, H query heads, G KV heads, D head size, W window.
"""

# pyright: reportGeneralTypeIssues=false
# To a type checker, a kernel that is called like a Python function never returns.

import triton
import triton.language as tl

from kvshift.ops.triton.forward import _forward_plain, _forward_rotated, _load_rows, _store_rows


@triton.jit
def _remember(state, x, x_b, x_g, x_d, heads, D, head, b, slot, real, R, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Append the raw row of one head to its state, whose oldest row is forgotten."""
    d = tl.arange(0, BLOCK)
    in_head = d < D
    row = tl.arange(0, 1) + slot * R
    state += head * D
    tl.debug_barrier()  # all threads have read the state
    for i in range(R - 1):
        later = _load_rows(state, heads * D, row + i + 1, real, d, in_head, ACC)
        tl.debug_barrier()
        _store_rows(state, heads * D, row + i, real, d, in_head, later)
    x += b * x_b + (b * 0 + head) * x_g
    now = _load_rows(x, 0, row * 0, real, d.to(tl.int64) * x_d, in_head, ACC)
    tl.debug_barrier()
    _store_rows(state, heads * D, row + R - 1, real, d, in_head, now)


@triton.jit
def step(
    q_out, k_cache, v_cache, k_state, v_state, q, k, v, alpha, beta, q_scale, k_scale, cos, sin, table_b, table_t,
    state_slots, cache_slots, cache_slot_b, page_size, H, G, Dk, Dv, R, q_lanes, k_lanes, v_lanes,
    q_b, q_g, q_d, k_b, k_g, k_d, v_b, v_g, v_d, kc_page, kc_row, kc_g, vc_page, vc_row, vc_g,
    OWN_PAGES: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STATE_K: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """q rotated into q_out; k shifted and rotated, and v shifted, into their caches; raw k and v into their states.

    Slots count rows, page after page; OWN_PAGES: within the page of that batch entry. Negative ones are left alone.
    Behind the end of its own page a token is written nowhere, and its q becomes NaN: nobody overlooks that.
    """
    lanes = q_lanes + k_lanes + v_lanes
    lane = tl.program_id(0) % lanes
    b = (tl.program_id(0) // lanes).to(tl.int64)
    row = tl.arange(0, 1)
    slot = b
    if state_slots is not None:
        slot = tl.load(state_slots + b).to(tl.int64)
    here = row == row
    real = here & (slot >= 0)
    newest = row + (slot + 1) * R
    at = b
    is_full = b < 0
    if cache_slots is not None:
        at = tl.load(cache_slots + b * cache_slot_b).to(tl.int64)
        if OWN_PAGES:
            is_full = at >= page_size
            at = tl.where((at < 0) | is_full, -1, at + b * page_size)
    written = real & (at >= 0)
    page = at // page_size
    line = at % page_size
    if lane < q_lanes:
        for head in range(lane * HEADS, tl.minimum((lane + 1) * HEADS, H)):
            _forward_rotated(
                q_out + (b * H + head) * Dk, 0, here, q, q_b, 0, q_g, q_d, None, None, q_scale,
                cos, sin, table_b, table_t, H, Dk, head, row, real, row, newest, b, 1, None, None, 1, BLOCK_K, EPS, ACC,
            )  # fmt: skip
            if OWN_PAGES:
                d = tl.arange(0, STATE_K)
                nan = tl.full((1, STATE_K), float("nan"), ACC)
                _store_rows(q_out + (b * H + head) * Dk, 0, row, here & is_full, d, d < Dk, nan)
    if (lane >= q_lanes) & (lane < q_lanes + k_lanes):
        for head in range((lane - q_lanes) * HEADS, tl.minimum((lane - q_lanes + 1) * HEADS, G)):
            _forward_rotated(
                k_cache + page * kc_page + line * kc_row + (b * 0 + head) * kc_g, 0, written,
                k, k_b, 0, k_g, k_d, alpha, k_state, k_scale,
                cos, sin, table_b, table_t, G, Dk, head, row, real, row, newest, b, 1, None, None, W, BLOCK_K, EPS, ACC,
            )  # fmt: skip
            _remember(k_state, k, k_b, k_g, k_d, G, Dk, head, b, slot, real, R, STATE_K, ACC)
    if lane >= q_lanes + k_lanes:
        lane -= q_lanes + k_lanes
        for head in range(lane * HEADS, tl.minimum((lane + 1) * HEADS, G)):
            _forward_plain(
                v_cache + page * vc_page + line * vc_row + (b * 0 + head) * vc_g, 0, written,
                v, v_b, 0, v_g, v_d, beta, v_state,
                G, Dv, head, row, real, row, newest, b, 1, None, None, W, BLOCK_V, ACC,
            )  # fmt: skip
            _remember(v_state, v, v_b, v_g, v_d, G, Dv, head, b, slot, real, R, BLOCK_V, ACC)
