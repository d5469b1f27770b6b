"""The gradients of `forward.py`, one launch for keys and values (and queries), one more where there is state.

Every row gathers the gradients of the positions that read it, walking forward where the operator walks back: nothing
is added atomically, and each program writes its own sums for the coefficients, which the caller adds up in one order.

Shapes and arguments as there; gx is the gradient of x.
"""

# pyright: reportGeneralTypeIssues=false
# To a type checker, a kernel that is called like a Python function never returns.

import triton
import triton.language as tl

from kvshift.ops.triton.forward import (
    _add,
    _angles,
    _inverse_norm,
    _is_real,
    _load_rows,
    _sequence_of,
    _shifted,
    _span_of,
    _store_rows,
    _times,
)


@triton.jit
def _step_forward(row, inside, end, b, T, seq_idx, links):
    """From each position to the one after it in its document; whether there is one."""
    at = b * T
    after = row + 1
    if links is not None:
        after = tl.load(links + (at + row) * 2 + 1, mask=inside, other=0)
    stays = inside & (after < end)
    if seq_idx is not None:
        same = tl.load(seq_idx + at + row, mask=stays, other=0) == tl.load(seq_idx + at + after, mask=stays, other=0)
        stays = stays & same
    return tl.where(stays, after, row), stays


@triton.jit
def _backward_plain(
    gx, gy, y_b, y_t, y_g, y_d, x, x_b, x_t, x_g, x_d, weights, partials, heads, D, head,
    t, real, end, b, T, seq_idx, links, W: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One head: gx[t] = weights[0] gy[t] + weights[1] gy[t+1] + ..., and partials[j] = sum of x[t] gy[t+j]."""
    d = tl.arange(0, BLOCK)
    in_head = d < D
    gy += b * y_b + (b * 0 + head) * y_g
    x += b * x_b + (b * 0 + head) * x_g
    gx += b * T * heads * D + head * D
    here = _load_rows(x, x_t, t, real, d.to(tl.int64) * x_d, in_head, ACC)
    column = d.to(tl.int64) * y_d
    total = tl.zeros_like(here)
    row = t
    inside = real
    for lag in tl.static_range(W):
        if lag > 0:
            row, inside = _step_forward(row, inside, end, b, T, seq_idx, links)
        g = _load_rows(gy, y_t, row, inside, column, in_head, ACC)
        weight = tl.load(weights + head * W + lag).to(ACC)
        total = _times(g, weight) if lag == 0 else _add(total, g, weight)
        tl.store(partials + head * W + lag, tl.sum(tl.sum(here * g, 1), 0))
    _store_rows(gx, heads * D, t, t < T, d, in_head, total)


@triton.jit
def _rotated_back(
    gy, y_t, y_d, x, x_t, x_d, weights, scale, cos, sin, table_b, table_t, D,
    row, there, first, b, T, seq_idx, links,
    W: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradient of what was shifted, from that of what was normalised and rotated, both halves at rows of one head.

    Returns:
        low, high, and their products with what the scale of the norm multiplies.
    """
    half = D // 2
    d = tl.arange(0, BLOCK)
    in_half = d < half
    column = d.to(tl.int64) * y_d
    g_low = _load_rows(gy, y_t, row, there, column, in_half, ACC)
    g_high = _load_rows(gy, y_t, row, there, column + (b * 0 + half) * y_d, in_half, ACC)
    c, s = _angles(cos, sin, table_b, table_t, b, row, there, d, in_half, ACC)
    low = g_low * c + g_high * s
    high = g_high * c - g_low * s
    s_low = low
    s_high = high
    if scale is not None:
        column = d.to(tl.int64) * x_d
        x_low = _shifted(
            x, x_t, column, None, 0, d, in_half, weights,
            row, there, first, first, b, T, seq_idx, links, W, ACC,
        )  # fmt: skip
        x_high = _shifted(
            x, x_t, column + (b * 0 + half) * x_d, None, 0, d, in_half, weights,
            row, there, first, first, b, T, seq_idx, links, W, ACC,
        )  # fmt: skip
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
    gx, gy, y_b, y_t, y_g, y_d, x, x_b, x_t, x_g, x_d, weights, scale, cos, sin, table_b, table_t, partials, heads, D,
    head, t, real, first, end, b, T, seq_idx, links,
    W: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One head, as `_backward_plain`. Returns this head's share of the gradient of the scale, both halves."""
    half = D // 2
    d = tl.arange(0, BLOCK)
    in_half = d < half
    gy += b * y_b + (b * 0 + head) * y_g
    if x is not None:  # queries are looked at only if there is a norm
        x += b * x_b + (b * 0 + head) * x_g
    gx += b * T * heads * D + head * D
    if weights is not None:
        weights += head * W
        partials += head * W
    low, high, s_low, s_high = _rotated_back(
        gy, y_t, y_d, x, x_t, x_d, weights, scale, cos, sin, table_b, table_t, D,
        t, real, first, b, T, seq_idx, links, W, BLOCK, EPS, ACC,
    )  # fmt: skip
    if weights is not None:
        column = d.to(tl.int64) * x_d
        here_low = _load_rows(x, x_t, t, real, column, in_half, ACC)
        here_high = _load_rows(x, x_t, t, real, column + (b * 0 + half) * x_d, in_half, ACC)
        tl.store(partials, tl.sum(tl.sum(here_low * low + here_high * high, 1), 0))
        weight = tl.load(weights).to(ACC)
        low = _times(low, weight)
        high = _times(high, weight)
        row = t
        inside = real
        for lag in tl.static_range(1, W):
            row, inside = _step_forward(row, inside, end, b, T, seq_idx, links)
            g_low, g_high, _, _ = _rotated_back(
                gy, y_t, y_d, x, x_t, x_d, weights, scale, cos, sin, table_b, table_t, D,
                row, inside, first, b, T, seq_idx, links, W, BLOCK, EPS, ACC,
            )  # fmt: skip
            tl.store(partials + lag, tl.sum(tl.sum(here_low * g_low + here_high * g_high, 1), 0))
            weight = tl.load(weights + lag).to(ACC)
            low = _add(low, g_low, weight)
            high = _add(high, g_high, weight)
    _store_rows(gx, heads * D, t, t < T, d, in_half, low)
    _store_rows(gx, heads * D, t, t < T, d + half, in_half, high)
    return tl.sum(s_low, 0), tl.sum(s_high, 0)


@triton.jit
def _store_halves(x, low, high, D, BLOCK: tl.constexpr):
    """A vector of D numbers, given in two halves."""
    d = tl.arange(0, BLOCK)
    tl.store(x + d, low, mask=d < D // 2)
    tl.store(x + D // 2 + d, high, mask=d < D // 2)


@triton.jit(do_not_specialize=["T", "tiles", "sequences", "search_steps", "q_lanes", "k_lanes", "v_lanes"])
def backward(
    gq, gk, gv, gq_out, gk_out, gv_out, q, k, v, alpha, beta, q_scale, k_scale, cos, sin, table_b, table_t,
    k_partials, v_partials, q_scale_partials, k_scale_partials, cu_seqlens, seq_idx, mask, links,
    T, tiles, H, G, Dk, Dv, sequences, search_steps, q_lanes, k_lanes, v_lanes,
    gq_b, gq_t, gq_g, gq_d, gk_b, gk_t, gk_g, gk_d, gv_b, gv_t, gv_g, gv_d,
    q_b, q_t, q_g, q_d, k_b, k_t, k_g, k_d, v_b, v_t, v_g, v_d,
    W: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients gq, gk, gv from those of the outputs; lanes and blocks as in `forward`.

    partials: (programs, G, W), which the caller adds up; of the scales (tiles, lanes, D). What gets no gradient, k or v
    that pass through, is left out by the compiler: it looks into branches that are never taken.
    """
    lanes = q_lanes + k_lanes + v_lanes
    lane = tl.program_id(0) % lanes
    tile = tl.program_id(0) // lanes
    b = (tile // tiles).to(tl.int64)
    t = (tile % tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = _is_real(t, b, T, mask)
    _, first, end = _sequence_of(tl.minimum(t, T - 1), b, T, cu_seqlens, sequences, search_steps)
    k_real = real
    if alpha is None:
        k_real = t < T
    if gq_out is not None:
        if lane < q_lanes:
            low = tl.zeros([BLOCK_K], ACC)
            high = tl.zeros([BLOCK_K], ACC)
            for head in range(lane * HEADS, tl.minimum((lane + 1) * HEADS, H)):
                s_low, s_high = _backward_rotated(
                    gq, gq_out, gq_b, gq_t, gq_g, gq_d, q, q_b, q_t, q_g, q_d, None, q_scale, cos, sin,
                    table_b, table_t, None, H, Dk, head, t, t < T, first, end, b, T, None, None,
                    1, BLOCK_K, EPS, ACC,
                )  # fmt: skip
                low += s_low
                high += s_high
            if q_scale is not None:
                _store_halves(q_scale_partials + (tile * q_lanes + lane) * Dk, low, high, Dk, BLOCK_K)
    if gk_out is not None:
        if (lane >= q_lanes) & (lane < q_lanes + k_lanes):
            lane_k = lane - q_lanes
            if alpha is not None:
                k_partials += (b * 0 + tile) * G * W
            if cos is None:
                for head in range(lane_k * HEADS, tl.minimum((lane_k + 1) * HEADS, G)):
                    _backward_plain(
                        gk, gk_out, gk_b, gk_t, gk_g, gk_d, k, k_b, k_t, k_g, k_d, alpha, k_partials, G, Dk, head,
                        t, real, end, b, T, seq_idx, links, W, BLOCK_K, ACC,
                    )  # fmt: skip
            else:
                low = tl.zeros([BLOCK_K], ACC)
                high = tl.zeros([BLOCK_K], ACC)
                for head in range(lane_k * HEADS, tl.minimum((lane_k + 1) * HEADS, G)):
                    s_low, s_high = _backward_rotated(
                        gk, gk_out, gk_b, gk_t, gk_g, gk_d, k, k_b, k_t, k_g, k_d, alpha, k_scale, cos, sin,
                        table_b, table_t, k_partials, G, Dk, head, t, k_real, first, end, b, T, seq_idx, links,
                        W, BLOCK_K, EPS, ACC,
                    )  # fmt: skip
                    low += s_low
                    high += s_high
                if k_scale is not None:
                    _store_halves(k_scale_partials + (tile * k_lanes + lane_k) * Dk, low, high, Dk, BLOCK_K)
    if gv_out is not None:
        if lane >= q_lanes + k_lanes:
            lane_v = lane - q_lanes - k_lanes
            v_partials += (b * 0 + tile) * G * W
            for head in range(lane_v * HEADS, tl.minimum((lane_v + 1) * HEADS, G)):
                _backward_plain(
                    gv, gv_out, gv_b, gv_t, gv_g, gv_d, v, v_b, v_t, v_g, v_d, beta, v_partials, G, Dv, head,
                    t, real, end, b, T, seq_idx, links, W, BLOCK_V, ACC,
                )  # fmt: skip


@triton.jit
def _first_of(sequence, cu_seqlens, mask, links, T):
    """Batch entry, first real position and end of each sequence; T or more if it has none."""
    b, first, end = _span_of(sequence, cu_seqlens, T)
    row = first
    if mask is not None:
        there = row < end
        real = tl.load(mask + b * T + row, mask=there, other=1) != 0
        row = tl.where(real, row, tl.load(links + (b * T + row) * 2 + 1, mask=there, other=0))
    return b, row, end


@triton.jit
def _backward_state_head(
    gstate, gy, y_b, y_t, y_g, y_d, state, weights, partials, heads, D, head, back, program,
    row, inside, end, state_row, there, b, T, seq_idx, links, W: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradient of the row of state `back` rows from its end, which lag j of the token of rank j - back reads.

    state_row: that row, of each sequence that is `there`.
    """
    d = tl.arange(0, BLOCK)
    in_head = d < D
    here = _load_rows(state + head * D, heads * D, state_row, there, d, in_head, ACC)
    total = tl.zeros_like(here)
    gy += (b * y_b + (b * 0 + head) * y_g)[:, None]
    partials += (program * heads + head).to(tl.int64) * W
    for lag in tl.static_range(1, W):
        if lag > 1:
            after, continues = _step_forward(row, inside, end, b, T, seq_idx, links)
            row = tl.where(lag > back, after, row)
            inside = tl.where(lag > back, continues, inside)
        g = _load_rows(gy, y_t, row, inside & (lag >= back), d.to(tl.int64) * y_d, in_head, ACC)
        total = _add(total, g, tl.load(weights + head * W + lag).to(ACC))
        share = tl.sum(tl.sum(here * g, 1), 0)
        tl.store(partials + lag, share)
    tl.store(partials, tl.zeros_like(share))
    _store_rows(gstate + head * D, heads * D, state_row, there, d, in_head, total)


@triton.jit(do_not_specialize=["T", "R", "sequences", "k_lanes", "v_lanes", "programs_before"])
def backward_state(
    gk_state, gv_state, gk_out, gv_out, alpha, beta, k_state, v_state, k_partials, v_partials,
    cu_seqlens, seq_idx, mask, links, T, G, Dk, Dv, R, sequences, k_lanes, v_lanes, programs_before,
    gk_b, gk_t, gk_g, gk_d, gv_b, gv_t, gv_g, gv_d,
    W: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of the newest W - 1 rows of state, and their share of those of the coefficients.

    One program for BLOCK_S sequences, one row of the state of each, and one head of k or v.
    """
    lanes = k_lanes + v_lanes
    lane = tl.program_id(0) % lanes
    back = tl.program_id(0) // lanes % (W - 1) + 1
    program = programs_before + tl.program_id(0) // lanes
    sequence = tl.program_id(0) // lanes // (W - 1) * BLOCK_S + tl.arange(0, BLOCK_S)
    there = sequence < sequences
    sequence = tl.minimum(sequence, sequences - 1)
    b, row, end = _first_of(sequence, cu_seqlens, mask, links, T)
    state_row = (sequence + 1) * R - back
    if gk_out is not None:
        if lane < k_lanes:
            _backward_state_head(
                gk_state, gk_out, gk_b, gk_t, gk_g, gk_d, k_state, alpha, k_partials, G, Dk, lane, back, program,
                row, (row < end) & there, end, state_row, there, b, T, seq_idx, links, W, BLOCK_K, ACC,
            )  # fmt: skip
    if gv_out is not None:
        if lane >= k_lanes:
            _backward_state_head(
                gv_state, gv_out, gv_b, gv_t, gv_g, gv_d, v_state, beta, v_partials, G, Dv, lane - k_lanes, back,
                program, row, (row < end) & there, end, state_row, there, b, T, seq_idx, links, W, BLOCK_V, ACC,
            )  # fmt: skip
