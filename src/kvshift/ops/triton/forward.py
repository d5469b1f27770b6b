"""The operator on a GPU, forward: one launch for keys, values, queries and the next state.

One program computes a tile: up to BLOCK_T positions of one batch entry, for HEADS heads one after another. Every tensor
is read by its strides; row offsets have 64 bits. Arithmetic is in ACC (float32, or float64 for float64), rounded once.
Arguments that are None and head sizes are compile-time constants; sizes that change from call to call are not.

The row that a lag reads is identified by a number: a position or, if negative, a row of state counted from the end.
Without boundaries it is t - lag; otherwise it is given by `sources`, as in `kvshift.ops.boundaries.ShiftPlan`.

Shapes: B batch, T positions, Q rows of state per batch entry, N rows of the next state, H query heads, G KV heads, D
head size, W window.
"""

# pyright: reportGeneralTypeIssues=false
# To a type checker, a kernel that is called like a Python function never returns.

import triton
import triton.language as tl

NO_ROW = tl.constexpr(-(2**31))

# Tiles: (positions, elements of a head) ------------------------------------------------------------------------------


@triton.jit
def _head(x, b, head, stride_b, stride_g, ALIGN: tl.constexpr):
    """Return a pointer to a head. Strides are in units of ALIGN elements, so that the compiler knows the alignment."""
    return x + (b * stride_b + tl.cast(head, tl.int64) * stride_g) * ALIGN


@triton.jit
def _load_rows(x, stride, row, there, column, in_head, ACC: tl.constexpr):
    """Load rows of one head; zero where `there` is False."""
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(x + at, mask=there[:, None] & in_head[None, :], other=0.0).to(ACC)


@triton.jit
def _store_rows(y, stride, row, there, column, in_head, value):
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=there[:, None] & in_head[None, :])


@triton.jit
def _source(sources, row, there, lag, W: tl.constexpr):
    """Return the row that this lag of each position reads."""
    source = row - lag if sources is None else tl.load(sources + row.to(tl.int64) * W + lag, mask=there, other=NO_ROW)
    return tl.where(there, source, NO_ROW)


@triton.jit
def _load_sources(
    x, stride, column, state, state_stride, state_column, source, Q, in_head, ACC: tl.constexpr,
):  # fmt: skip
    """Load the rows of x and of the state that `source` refers to."""
    rows = _load_rows(x, stride, source, source >= 0, column, in_head, ACC)
    if state is not None:
        of_state = (source < 0) & (source >= -Q)
        before = _load_rows(state, state_stride, source + Q, of_state, state_column, in_head, ACC)
        rows = tl.where(of_state[:, None], before, rows)
    return rows


@triton.jit
def _times(term, weight):
    """Return weight * term; zero for a weight of zero, whatever the term, so that no infinity becomes NaN."""
    return tl.where(weight == 0, 0.0, term * weight)


@triton.jit
def _add(total, term, weight):
    """Return total + weight * term; exactly total for a weight of zero."""
    # An explicit fma: otherwise kernels could fuse different products of a sum, and give different bits.
    return tl.where(weight == 0, total, tl.fma(term, weight, total))


@triton.jit
def _shifted(
    x, stride, column, state, state_stride, state_column, in_head, weights, sources, row, there, Q,
    W: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return weights[0] x[t] + weights[1] x[t-1] + ..., without terms of zero weight; x itself if weights is None."""
    now = row if weights is None else _source(sources, row, there, 0, W)
    total = _load_rows(x, stride, now, there & (now >= 0), column, in_head, ACC)
    if weights is not None:
        total = _times(total, tl.load(weights).to(ACC))
        for lag in tl.static_range(1, W):
            source = _source(sources, row, there, lag, W)
            term = _load_sources(x, stride, column, state, state_stride, state_column, source, Q, in_head, ACC)
            total = _add(total, term, tl.load(weights + lag).to(ACC))
    return total


@triton.jit
def _angles(cos, sin, table_t, row, there, d, in_half, ACC: tl.constexpr):
    """Load cosines and sines from rows of the tables of a batch entry, (T, D/2)."""
    at = row.to(tl.int64)[:, None] * table_t + d[None, :]
    seen = there[:, None] & in_half[None, :]
    return tl.load(cos + at, mask=seen, other=1.0).to(ACC), tl.load(sin + at, mask=seen, other=0.0).to(ACC)


@triton.jit
def _inverse_norm(low, high, D: tl.constexpr, EPS: tl.constexpr):
    return tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + EPS)[:, None]


# One head ------------------------------------------------------------------------------------------------------------


@triton.jit
def _forward_plain(
    y, y_t, x, x_t, x_d, state, state_t, weights, sources, t, there, Q,
    W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the shifted rows to y."""
    d = tl.arange(0, BLOCK)
    in_head = d < D
    value = _shifted(
        x, x_t, d.to(tl.int64) * x_d, state, state_t, d, in_head, weights, sources, t, there, Q, W, ACC
    )  # fmt: skip
    _store_rows(y, y_t, t, there, d, in_head, value)


@triton.jit
def _forward_rotated(
    y, y_t, x, x_t, x_d, state, state_t, weights, scale, cos, sin, table_t, sources, t, there, Q,
    W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Shift, normalise by the root mean square and rotate, in the two halves that the rotation pairs."""
    half: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK)
    in_half = d < half
    column = d.to(tl.int64)
    low = _shifted(
        x, x_t, column * x_d, state, state_t, d, in_half, weights, sources, t, there, Q, W, ACC
    )  # fmt: skip
    high = _shifted(
        x, x_t, (column + half) * x_d, state, state_t, d + half, in_half, weights, sources, t, there, Q, W, ACC
    )  # fmt: skip
    if scale is not None:
        inverse = _inverse_norm(low, high, D, EPS)
        low *= inverse * tl.load(scale + d, mask=in_half, other=0.0).to(ACC)[None, :]
        high *= inverse * tl.load(scale + half + d, mask=in_half, other=0.0).to(ACC)[None, :]
    c, s = _angles(cos, sin, table_t, t, there, d, in_half, ACC)
    _store_rows(y, y_t, t, there, d, in_half, low * c - high * s)
    _store_rows(y, y_t, t, there, d + half, in_half, high * c + low * s)


@triton.jit
def _next_rows(
    y, y_t, x, x_t, x_d, state, state_t, next_state, T, Q, N,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the N rows of the next state of a batch entry."""
    d = tl.arange(0, BLOCK)
    in_head = d < D
    for first in range(0, N, BLOCK_T):
        n = first + tl.arange(0, BLOCK_T)
        there = n < N
        source = tl.where(there, n + (T - N), NO_ROW)
        if next_state is not None:
            source = tl.load(next_state + n, mask=there, other=NO_ROW)
        value = _load_sources(x, x_t, d.to(tl.int64) * x_d, state, state_t, d, source, Q, in_head, ACC)
        _store_rows(y, y_t, n, there, d, in_head, value)


@triton.jit
def _forward_head(
    y, y_next, x, x_b, x_t, x_g, x_d, state, weights, scale, cos, sin, table_t, sources, next_state, heads, b, head,
    t, there, of_state, T, Q, N, W: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
    EPS: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute one head of a batch entry: a tile of its output, or its whole next state."""
    row = heads * D
    x = _head(x, b, head, x_b, x_g, ALIGN)
    if weights is not None:
        weights += head * W
    if state is not None:
        state += (b * Q * heads + head) * D
    if of_state:
        if y_next is not None:
            WHOLE: tl.constexpr = BLOCK if cos is None else 2 * BLOCK
            y_next += (b * N * heads + head) * D
            _next_rows(y_next, row, x, x_t * ALIGN, x_d, state, row, next_state, T, Q, N, D, BLOCK_T, WHOLE, ACC)
    elif y is not None:
        y += (b * T * heads + head) * D
        if cos is None:
            _forward_plain(y, row, x, x_t * ALIGN, x_d, state, row, weights, sources, t, there, Q, W, D, BLOCK, ACC)
        else:
            _forward_rotated(
                y, row, x, x_t * ALIGN, x_d, state, row, weights, scale, cos, sin, table_t, sources, t, there, Q,
                W, D, BLOCK, EPS, ACC,
            )  # fmt: skip


# The kernel ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["B", "T", "Q", "N", "tiles", "q_lanes", "k_lanes", "v_lanes"])
def forward(
    q_out, k_out, v_out, k_next, v_next, q, k, v, alpha, beta, k_state, v_state, cos, sin, q_scale, k_scale,
    sources, next_state, B, T, H, G, Q, N, tiles, q_lanes, k_lanes, v_lanes, table_b, table_t,
    q_b, q_t, q_g, q_d, k_b, k_t, k_g, k_d, v_b, v_t, v_g, v_d,
    Dk: tl.constexpr, Dv: tl.constexpr, W: tl.constexpr, EPS: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALIGN: tl.constexpr, ALIGN_TABLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rotate q, shift (and rotate) k, and shift v. A lane consists of HEADS heads of q, of k or of v.

    Without rotary embedding, `q` and `cos` are None. Outputs that are not needed are None. After the tiles of positions
    comes one tile per batch entry for the next state. BLOCK_K covers a head of k, or half a head with rotary
    embedding.
    """
    lanes = q_lanes + k_lanes + v_lanes
    lane = tl.program_id(0) % lanes
    tile = tl.program_id(0) // lanes
    of_state = tile >= B * tiles
    b = tl.where(of_state, tile - B * tiles, tile // tiles).to(tl.int64)
    t = (tile % tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = t < T
    table_t *= ALIGN_TABLE
    if cos is not None:
        cos += b * table_b * ALIGN_TABLE
        sin += b * table_b * ALIGN_TABLE
    if sources is not None:
        sources += b * T * W
    if next_state is not None:
        next_state += b * N
    if lane < q_lanes:
        if q is not None:
            for head in range(lane * HEADS, tl.minimum((lane + 1) * HEADS, H)):
                _forward_head(
                    q_out, None, q, q_b, q_t, q_g, q_d, None, None, q_scale, cos, sin, table_t, None, None, H, b, head,
                    t, there, of_state, T, Q, N, 1, Dk, BLOCK_T, BLOCK_K, EPS, ALIGN, ACC,
                )  # fmt: skip
    elif lane < q_lanes + k_lanes:
        first = (lane - q_lanes) * HEADS
        for head in range(first, tl.minimum(first + HEADS, G)):
            _forward_head(
                k_out, k_next, k, k_b, k_t, k_g, k_d, k_state, alpha, k_scale, cos, sin, table_t, sources, next_state,
                G, b, head, t, there, of_state, T, Q, N, W, Dk, BLOCK_T, BLOCK_K, EPS, ALIGN, ACC,
            )  # fmt: skip
    elif v is not None:
        first = (lane - q_lanes - k_lanes) * HEADS
        for head in range(first, tl.minimum(first + HEADS, G)):
            _forward_head(
                v_out, v_next, v, v_b, v_t, v_g, v_d, v_state, beta, None, None, None, 0, sources, next_state,
                G, b, head, t, there, of_state, T, Q, N, W, Dv, BLOCK_T, BLOCK_V, EPS, ALIGN, ACC,
            )  # fmt: skip
