"""The gradients of `forward.py`, in one launch for keys, values and queries.

Every row gathers the gradients of the positions that read it. There are no atomic additions: each program writes
partial sums for the coefficients, which the caller adds in a fixed order. Without boundaries, the position whose lag j
reads row t is t + j; otherwise it is given by `readers`, as in `kvshift.ops.boundaries.ShiftPlan`. Rows of state are
few, so their part is left to plain operations.

Shapes and arguments are those of `forward.py`; gx is the gradient of x.
"""

# pyright: reportGeneralTypeIssues=false
# To a type checker, a kernel that is called like a Python function never returns.

import triton
import triton.language as tl

from kvshift.ops.triton.forward import (
    NO_ROW,
    _add,
    _angles,
    _head,
    _inverse_norm,
    _load_rows,
    _shifted,
    _store_rows,
    _times,
)


@triton.jit
def _reader(readers, t, there, lag, T, W: tl.constexpr):
    """Return the position whose lag reads each position; negative if there is none."""
    reader = t + lag if readers is None else tl.load(readers + t.to(tl.int64) * W + lag, mask=there, other=NO_ROW)
    return tl.where(reader < T, reader, NO_ROW)


@triton.jit
def _backward_plain(
    gx, gx_t, gy, y_t, y_d, x, x_t, x_d, weights, partials, readers, t, there, T,
    W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """For one head: gx[t] = weights[0] gy[t] + weights[1] gy[t+1] + ..., and partials[j] = sum of x[t] gy[t+j]."""
    d = tl.arange(0, BLOCK)
    in_head = d < D
    real = _reader(readers, t, there, 0, T, W) >= 0
    here = _load_rows(x, x_t, t, real, d.to(tl.int64) * x_d, in_head, ACC)
    total = tl.zeros_like(here)
    for lag in tl.static_range(W):
        reader = _reader(readers, t, there, lag, T, W)
        g = _load_rows(gy, y_t, reader, reader >= 0, d.to(tl.int64) * y_d, in_head, ACC)
        weight = tl.load(weights + lag).to(ACC)
        total = _times(g, weight) if lag == 0 else _add(total, g, weight)
        tl.store(partials + lag, tl.sum(tl.sum(here * g, 1), 0))
    _store_rows(gx, gx_t, t, there, d, in_head, total)


@triton.jit
def _rotated_back(
    gy, y_t, y_d, x, x_t, x_d, weights, scale, cos, sin, table_t, sources, row, there,
    W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Backpropagate through rotation and norm, for rows of one head: from the gradient gy to that of the shifted rows.

    Returns:
        Both halves of the gradient, low and high, and both halves of the terms of the gradient of the scale.
    """
    half: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK)
    in_half = d < half
    column = d.to(tl.int64)
    g_low = _load_rows(gy, y_t, row, there, column * y_d, in_half, ACC)
    g_high = _load_rows(gy, y_t, row, there, (column + half) * y_d, in_half, ACC)
    c, s = _angles(cos, sin, table_t, row, there, d, in_half, ACC)
    low = g_low * c + g_high * s
    high = g_high * c - g_low * s
    s_low = low
    s_high = high
    if scale is not None:  # such a call has no state
        x_low = _shifted(x, x_t, column * x_d, None, 0, d, in_half, weights, sources, row, there, 0, W, ACC)
        x_high = _shifted(x, x_t, (column + half) * x_d, None, 0, d, in_half, weights, sources, row, there, 0, W, ACC)
        inverse = _inverse_norm(x_low, x_high, D, EPS)
        x_low *= inverse
        x_high *= inverse
        s_low = low * x_low
        s_high = high * x_high
        low *= tl.load(scale + d, mask=in_half, other=0.0).to(ACC)[None, :]
        high *= tl.load(scale + half + d, mask=in_half, other=0.0).to(ACC)[None, :]
        along = ((tl.sum(low * x_low, 1) + tl.sum(high * x_high, 1)) / D)[:, None]
        low = inverse * (low - x_low * along)
        high = inverse * (high - x_high * along)
    return low, high, s_low, s_high


@triton.jit
def _backward_rotated(
    gx, gx_t, gy, y_t, y_d, x, x_t, x_d, weights, scale, cos, sin, table_t, partials, sources, readers, t, there, T,
    W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Do `_backward_plain` with rotation. Return both halves of the head's part of the gradient of the scale."""
    half: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK)
    in_half = d < half
    real = there if weights is None else _reader(readers, t, there, 0, T, W) >= 0
    low, high, s_low, s_high = _rotated_back(
        gy, y_t, y_d, x, x_t, x_d, weights, scale, cos, sin, table_t, sources, t, real, W, D, BLOCK, EPS, ACC
    )  # fmt: skip
    if weights is not None:
        column = d.to(tl.int64)
        here_low = _load_rows(x, x_t, t, real, column * x_d, in_half, ACC)
        here_high = _load_rows(x, x_t, t, real, (column + half) * x_d, in_half, ACC)
        tl.store(partials, tl.sum(tl.sum(here_low * low + here_high * high, 1), 0))
        weight = tl.load(weights).to(ACC)
        low = _times(low, weight)
        high = _times(high, weight)
        for lag in tl.static_range(1, W):
            reader = _reader(readers, t, there, lag, T, W)
            g_low, g_high, _, _ = _rotated_back(
                gy, y_t, y_d, x, x_t, x_d, weights, scale, cos, sin, table_t, sources, reader, reader >= 0,
                W, D, BLOCK, EPS, ACC,
            )  # fmt: skip
            tl.store(partials + lag, tl.sum(tl.sum(here_low * g_low + here_high * g_high, 1), 0))
            weight = tl.load(weights + lag).to(ACC)
            low = _add(low, g_low, weight)
            high = _add(high, g_high, weight)
    _store_rows(gx, gx_t, t, there, d, in_half, low)
    _store_rows(gx, gx_t, t, there, d + half, in_half, high)
    return tl.sum(s_low, 0), tl.sum(s_high, 0)


@triton.jit
def _backward_heads(
    gx, gy, y_b, y_t, y_g, y_d, x, x_b, x_t, x_g, x_d, weights, scale, cos, sin, table_t, partials, scale_partials,
    sources, readers, b, tile, lane, lanes, heads, t, there, T,
    W: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Compute the gradients for the heads of one lane of q, of k or of v."""
    first = lane * HEADS
    d = tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], ACC)
    high = tl.zeros([BLOCK], ACC)
    for head in range(first, tl.minimum(first + HEADS, heads)):
        gx_head = gx + (b * T * heads + head) * D
        gy_head = _head(gy, b, head, y_b, y_g, ALIGN)
        x_head = x
        if x is not None:  # queries are read only if there is a norm
            x_head = _head(x, b, head, x_b, x_g, ALIGN)
        w_head = weights
        p_head = partials
        if weights is not None:
            w_head = weights + head * W
            p_head = partials + (tile * heads + head) * W
        if cos is None:
            _backward_plain(
                gx_head, heads * D, gy_head, y_t * ALIGN, y_d, x_head, x_t * ALIGN, x_d, w_head, p_head,
                readers, t, there, T, W, D, BLOCK, ACC,
            )  # fmt: skip
        else:
            s_low, s_high = _backward_rotated(
                gx_head, heads * D, gy_head, y_t * ALIGN, y_d, x_head, x_t * ALIGN, x_d, w_head, scale,
                cos, sin, table_t, p_head, sources, readers, t, there, T, W, D, BLOCK, EPS, ACC,
            )  # fmt: skip
            low += s_low
            high += s_high
    if scale is not None:
        scale_partials += (tile * lanes + lane) * D
        tl.store(scale_partials + d, low, mask=d < D // 2)
        tl.store(scale_partials + D // 2 + d, high, mask=d < D // 2)


@triton.jit(do_not_specialize=["T", "Q", "tiles", "q_lanes", "k_lanes", "v_lanes"])
def backward(
    gq, gk, gv, gq_out, gk_out, gv_out, k_partials, v_partials, q_scale_partials, k_scale_partials,
    q, k, v, alpha, beta, cos, sin, q_scale, k_scale, sources, readers,
    T, H, G, Q, tiles, q_lanes, k_lanes, v_lanes, table_b, table_t,
    gq_b, gq_t, gq_g, gq_d, gk_b, gk_t, gk_g, gk_d, gv_b, gv_t, gv_g, gv_d,
    q_b, q_t, q_g, q_d, k_b, k_t, k_g, k_d, v_b, v_t, v_g, v_d,
    Dk: tl.constexpr, Dv: tl.constexpr, W: tl.constexpr, EPS: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALIGN: tl.constexpr, ALIGN_TABLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute the gradients gq, gk and gv from those of the outputs. Lanes and blocks are as in `forward`.

    The caller adds up the partials, (tiles, G, W), and those of the scales, (tiles, lanes, D). Tensors that need no
    gradient are None.
    """
    lanes = q_lanes + k_lanes + v_lanes
    lane = tl.program_id(0) % lanes
    tile = (tl.program_id(0) // lanes).to(tl.int64)
    b = tile // tiles
    t = (tile % tiles).to(tl.int32) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = t < T
    table_t *= ALIGN_TABLE
    if cos is not None:
        cos += b * table_b * ALIGN_TABLE
        sin += b * table_b * ALIGN_TABLE
    if sources is not None:
        sources += b * T * W
    if readers is not None:
        readers += (b * (Q + T) + Q) * W
    if lane < q_lanes:
        if gq_out is not None:
            _backward_heads(
                gq, gq_out, gq_b, gq_t, gq_g, gq_d, q, q_b, q_t, q_g, q_d, None, q_scale, cos, sin, table_t,
                None, q_scale_partials, None, None, b, tile, lane, q_lanes, H, t, there, T,
                1, Dk, EPS, HEADS, BLOCK_K, ALIGN, ACC,
            )  # fmt: skip
    elif lane < q_lanes + k_lanes:
        if gk_out is not None:
            _backward_heads(
                gk, gk_out, gk_b, gk_t, gk_g, gk_d, k, k_b, k_t, k_g, k_d, alpha, k_scale, cos, sin, table_t,
                k_partials, k_scale_partials, sources, readers, b, tile, lane - q_lanes, k_lanes, G, t, there, T,
                W, Dk, EPS, HEADS, BLOCK_K, ALIGN, ACC,
            )  # fmt: skip
    elif gv_out is not None:
        _backward_heads(
            gv, gv_out, gv_b, gv_t, gv_g, gv_d, v, v_b, v_t, v_g, v_d, beta, None, None, None, 0,
            v_partials, None, sources, readers, b, tile, lane - q_lanes - k_lanes, v_lanes, G, t, there, T,
            W, Dv, EPS, HEADS, BLOCK_V, ALIGN, ACC,
        )  # fmt: skip
