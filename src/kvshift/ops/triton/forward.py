"""The operator on a GPU: forward and the next state, each one launch for keys and values (and queries).

One program computes a tile: up to BLOCK_T positions of one batch entry, for HEADS heads one after another. Every tensor
is read by its strides; offsets of rows have 64 bits. Arithmetic is in ACC (float32, or float64 for float64), rounded
once. What is None is compiled out; sizes that change from call to call are not compiled in.

Where a token's predecessor stands is found by walking: one step back per lag, until the walk leaves the sequence. It
then continues in the state of that sequence, or ends at a document boundary (`_step_back`). Backward, in
`backward.py`, walks the other way.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
Boundaries: `cu_seqlens` (S + 1), `seq_idx` (B, T), `mask` (B, T), `links` (B, T, 2): the real position before and the
one after, -1 and T where there is none; present with a mask.
"""

# pyright: reportGeneralTypeIssues=false
# To a type checker, a kernel that is called like a Python function never returns.

import triton
import triton.language as tl

# Walking -------------------------------------------------------------------------------------------------------------


@triton.jit
def _sequence_of(t, b, T, cu_seqlens, sequences, search_steps):
    """The sequence that holds position t, and the positions between which it lies."""
    low = t * 0
    first = t * 0
    end = first + T
    if cu_seqlens is None:
        low += b.to(tl.int32)
    else:
        high = low + (sequences - 1)
        for _ in range(search_steps):  # for the first sequence that ends behind t: empty ones are passed over
            middle = (low + high) // 2
            is_before = tl.load(cu_seqlens + middle + 1) <= t
            low = tl.where(is_before, middle + 1, low)
            high = tl.where(is_before, high, middle)
        first = tl.load(cu_seqlens + low).to(tl.int32)
        end = tl.load(cu_seqlens + low + 1).to(tl.int32)
    return low, first, end


@triton.jit
def _span_of(sequence, cu_seqlens, T):
    """Batch entry of each sequence, and the positions between which it lies."""
    b = sequence.to(tl.int64)
    first = sequence * 0
    end = first + T
    if cu_seqlens is not None:
        b = b * 0
        first = tl.load(cu_seqlens + sequence).to(tl.int32)
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    return b, first, end


@triton.jit
def _is_real(t, b, T, mask):
    inside = t < T
    if mask is not None:
        inside = tl.load(mask + b * T + t, mask=inside, other=0) != 0
    return inside


@triton.jit
def _step_back(row, inside, alive, depth, first, b, T, seq_idx, links):
    """From each row to the one before it.

    Returns:
        row; inside: whether it is a position of this call; alive: whether there is anything, else the term is zero;
        depth: how far the walk went into the state, 1 for its newest row.
    """
    at = b * T
    before = row - 1
    if links is not None:
        before = tl.load(links + (at + row) * 2, mask=inside, other=-1)
    stays = inside & (before >= first)
    if seq_idx is not None:
        same = tl.load(seq_idx + at + row, mask=stays, other=0) == tl.load(seq_idx + at + before, mask=stays, other=0)
        alive = alive & (same | (stays == 0))
        stays = stays & same
    return tl.where(stays, before, row), stays, alive, tl.where(stays, depth, depth + 1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["T", "blocks"])
def links(out, mask, T, blocks, BLOCK: tl.constexpr):
    """The real position before each one, -1 for none, and the one after, T for none: (B, T, 2), a program for each row.

    Both are written from where they stand: to the position after each one, and to the one before.
    """
    at = tl.program_id(0).to(tl.int64) * T
    t = tl.arange(0, BLOCK)
    last = (tl.program_id(0) * 0 - 1).to(tl.int32)
    for i in range(blocks):
        here = i * BLOCK + t
        found = tl.where(tl.load(mask + at + here, mask=here < T, other=0) != 0, here, -1)
        found = tl.maximum(tl.associative_scan(found, 0, _larger), last)
        tl.store(out + (at + here + 1) * 2, found, mask=here + 1 < T)
        last = tl.max(found, 0)
    coming = last * 0 + T
    for i in range(blocks):
        here = (blocks - 1 - i) * BLOCK + t
        found = tl.where(tl.load(mask + at + here, mask=here < T, other=0) != 0, here, T)
        found = tl.minimum(tl.associative_scan(found, 0, _smaller, reverse=True), coming)
        tl.store(out + (at + here - 1) * 2 + 1, found, mask=(here > 0) & (here < T))
        coming = tl.min(found, 0)
    tl.store(out + at * 2 + t, -1, mask=t < 1)
    tl.store(out + (at + T) * 2 - 1 + t, T, mask=t < 1)


# Tiles: (positions, elements of a head) ------------------------------------------------------------------------------


@triton.jit
def _load_rows(x, stride, row, there, column, in_head, ACC: tl.constexpr):
    """Rows of one head; zero where `there` is False."""
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(x + at, mask=there[:, None] & in_head[None, :], other=0.0).to(ACC)


@triton.jit
def _store_rows(y, stride, row, there, column, in_head, value):
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=there[:, None] & in_head[None, :])


@triton.jit
def _times(term, weight):
    """weight * term; zero, whatever the term, for a weight of zero: no infinity becomes NaN."""
    return tl.where(weight == 0, 0.0, term * weight)


@triton.jit
def _add(total, term, weight):
    """total + weight * term; every bit of total for a weight of zero."""
    # Spelled out: which product of a sum is fused would else differ from kernel to kernel, and its bits.
    return tl.where(weight == 0, total, tl.fma(term, weight, total))


@triton.jit
def _shifted(
    x, stride, column, state, state_stride, state_column, in_head, weights,
    row, real, first, newest, b, T, seq_idx, links, W: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """weights[0] x[t] + weights[1] x[t-1] + ... without the terms whose weight is zero; x itself if weights is None.

    Args:
        x, state: at the first element of this head, and batch entry, or of the state of all sequences.
        newest: behind which row of `state` the state of this sequence ends.
    """
    total = _load_rows(x, stride, row, real, column, in_head, ACC)
    if weights is not None:
        total = _times(total, tl.load(weights).to(ACC))
        inside = real
        alive = real
        depth = row * 0
        for lag in tl.static_range(1, W):
            row, inside, alive, depth = _step_back(row, inside, alive, depth, first, b, T, seq_idx, links)
            term = _load_rows(x, stride, row, inside & alive, column, in_head, ACC)
            if state is not None:
                of_state = alive & (inside == 0)
                before = _load_rows(state, state_stride, newest - depth, of_state, state_column, in_head, ACC)
                term = tl.where(of_state[:, None], before, term)
            total = _add(total, term, tl.load(weights + lag).to(ACC))
    return total


@triton.jit
def _angles(cos, sin, table_b, table_t, b, row, there, d, in_half, ACC: tl.constexpr):
    """Of rows of the tables, (L, T, D/2); table_b is 0 where all batch entries have the same."""
    at = b * table_b + row.to(tl.int64)[:, None] * table_t + d[None, :]
    seen = there[:, None] & in_half[None, :]
    return tl.load(cos + at, mask=seen, other=1.0).to(ACC), tl.load(sin + at, mask=seen, other=0.0).to(ACC)


@triton.jit
def _inverse_norm(low, high, D, EPS: tl.constexpr):
    return tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + EPS)[:, None]


# Forward -------------------------------------------------------------------------------------------------------------


@triton.jit
def _forward_plain(
    y, y_t, written, x, x_b, x_t, x_g, x_d, weights, state, heads, D, head,
    t, real, first, newest, b, T, seq_idx, links, W: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One head, shifted, into the rows of y, at the first element of the head, that are to be written."""
    d = tl.arange(0, BLOCK)
    in_head = d < D
    x += b * x_b + (b * 0 + head) * x_g
    if weights is not None:
        weights += head * W
    if state is not None:
        state += head * D
    value = _shifted(
        x, x_t, d.to(tl.int64) * x_d, state, heads * D, d, in_head, weights,
        t, real, first, newest, b, T, seq_idx, links, W, ACC,
    )  # fmt: skip
    _store_rows(y, y_t, t, written, d, in_head, value)


@triton.jit
def _forward_rotated(
    y, y_t, written, x, x_b, x_t, x_g, x_d, weights, state, scale, cos, sin, table_b, table_t, heads, D, head,
    t, real, first, newest, b, T, seq_idx, links,
    W: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One head, shifted, normalised by its root mean square and rotated: in two halves, as the rotation pairs them."""
    half = D // 2
    d = tl.arange(0, BLOCK)
    in_half = d < half
    x += b * x_b + (b * 0 + head) * x_g
    if weights is not None:
        weights += head * W
    if state is not None:
        state += head * D
    column = d.to(tl.int64) * x_d
    low = _shifted(
        x, x_t, column, state, heads * D, d, in_half, weights,
        t, real, first, newest, b, T, seq_idx, links, W, ACC,
    )  # fmt: skip
    high = _shifted(
        x, x_t, column + (b * 0 + half) * x_d, state, heads * D, d + half, in_half, weights,
        t, real, first, newest, b, T, seq_idx, links, W, ACC,
    )  # fmt: skip
    if scale is not None:
        inverse = _inverse_norm(low, high, D, EPS)
        low *= inverse * tl.load(scale + d, mask=in_half, other=0.0).to(ACC)[None, :]
        high *= inverse * tl.load(scale + half + d, mask=in_half, other=0.0).to(ACC)[None, :]
    c, s = _angles(cos, sin, table_b, table_t, b, t, real, d, in_half, ACC)
    _store_rows(y, y_t, t, written, d, in_half, low * c - high * s)
    _store_rows(y, y_t, t, written, d + half, in_half, high * c + low * s)


@triton.jit(do_not_specialize=["T", "tiles", "R", "sequences", "search_steps", "q_lanes", "k_lanes", "v_lanes"])
def forward(
    q_out, k_out, v_out, q, k, v, alpha, beta, k_state, v_state, q_scale, k_scale, cos, sin, table_b, table_t,
    cu_seqlens, seq_idx, mask, links,
    T, tiles, H, G, Dk, Dv, R, sequences, search_steps, q_lanes, k_lanes, v_lanes,
    q_b, q_t, q_g, q_d, k_b, k_t, k_g, k_d, v_b, v_t, v_g, v_d,
    W: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """q rotated, k shifted (and rotated), v shifted. A lane is HEADS heads of q, of k or of v.

    `q` is None without rotary embedding, `cos` with it. BLOCK_K spans a head of k, or half of one that is rotated.
    """
    lanes = q_lanes + k_lanes + v_lanes
    lane = tl.program_id(0) % lanes
    tile = tl.program_id(0) // lanes
    b = (tile // tiles).to(tl.int64)
    t = (tile % tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = _is_real(t, b, T, mask)
    sequence, first, _ = _sequence_of(tl.minimum(t, T - 1), b, T, cu_seqlens, sequences, search_steps)
    newest = (sequence + 1) * R
    k_real = real
    if alpha is None:  # what is not shifted passes through, padding included
        k_real = t < T
    if q is not None:
        if lane < q_lanes:
            for head in range(lane * HEADS, tl.minimum((lane + 1) * HEADS, H)):
                _forward_rotated(
                    q_out + (b * T * H + head) * Dk, H * Dk, t < T, q, q_b, q_t, q_g, q_d, None, None, q_scale,
                    cos, sin, table_b, table_t, H, Dk, head, t, t < T, first, newest, b, T, None, None,
                    1, BLOCK_K, EPS, ACC,
                )  # fmt: skip
    if (lane >= q_lanes) & (lane < q_lanes + k_lanes):
        for head in range((lane - q_lanes) * HEADS, tl.minimum((lane - q_lanes + 1) * HEADS, G)):
            if cos is None:
                _forward_plain(
                    k_out + (b * T * G + head) * Dk, G * Dk, t < T, k, k_b, k_t, k_g, k_d, alpha, k_state,
                    G, Dk, head, t, real, first, newest, b, T, seq_idx, links, W, BLOCK_K, ACC,
                )  # fmt: skip
            else:
                _forward_rotated(
                    k_out + (b * T * G + head) * Dk, G * Dk, t < T, k, k_b, k_t, k_g, k_d, alpha, k_state, k_scale,
                    cos, sin, table_b, table_t, G, Dk, head, t, k_real, first, newest, b, T, seq_idx, links,
                    W, BLOCK_K, EPS, ACC,
                )  # fmt: skip
    if lane >= q_lanes + k_lanes:
        lane -= q_lanes + k_lanes
        for head in range(lane * HEADS, tl.minimum((lane + 1) * HEADS, G)):
            _forward_plain(
                v_out + (b * T * G + head) * Dv, G * Dv, t < T, v, v_b, v_t, v_g, v_d, beta, v_state,
                G, Dv, head, t, real, first, newest, b, T, seq_idx, links, W, BLOCK_V, ACC,
            )  # fmt: skip


# The next state ------------------------------------------------------------------------------------------------------


@triton.jit
def _next_state_of_head(
    next_rows, x, x_b, x_t, x_g, x_d, state, heads, D, head, N, row, inside, alive, depth, first, sequence, there,
    newest, b, T, seq_idx, links, BACKWARD: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rows of one head, the newest last, by a walk from the end; BACKWARD: their gradients to where they came from."""
    d = tl.arange(0, BLOCK)
    in_head = d < D
    x += (b * x_b + (b * 0 + head) * x_g)[:, None]
    next_rows += head * D
    column = d.to(tl.int64) * x_d
    for i in range(N):
        at = (sequence + 1) * N - 1 - i
        of_x = inside & alive
        of_state = alive & (inside == 0)
        if BACKWARD:
            value = _load_rows(next_rows, heads * D, at, alive, d, in_head, ACC)
            _store_rows(x, x_t, row, of_x, column, in_head, value)
            if state is not None:
                _store_rows(state + head * D, heads * D, newest - depth, of_state, d, in_head, value)
        else:
            value = _load_rows(x, x_t, row, of_x, column, in_head, ACC)
            if state is not None:
                before = _load_rows(state + head * D, heads * D, newest - depth, of_state, d, in_head, ACC)
                value = tl.where(of_state[:, None], before, value)
            _store_rows(next_rows, heads * D, at, there, d, in_head, value)
        row, inside, alive, depth = _step_back(row, inside, alive, depth, first, b, T, seq_idx, links)


@triton.jit(do_not_specialize=["T", "R", "N", "sequences", "lanes"])
def next_state(
    k_next, v_next, k, v, k_state, v_state, cu_seqlens, seq_idx, mask, links, T, G, Dk, Dv, R, N, sequences, lanes,
    k_b, k_t, k_g, k_d, v_b, v_t, v_g, v_d,
    BACKWARD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The last N rows of every sequence, state included, (S, N, G, D); a program for BLOCK_S sequences of one head.

    BACKWARD: `k_next` and `v_next` are gradients, and k, v, k_state, v_state zeros that take them.
    """
    lane = tl.program_id(0) % lanes
    sequence = tl.program_id(0) // lanes * BLOCK_S + tl.arange(0, BLOCK_S)
    there = sequence < sequences
    sequence = tl.minimum(sequence, sequences - 1)
    b, first, end = _span_of(sequence, cu_seqlens, T)
    row = end - 1
    if mask is not None:
        has_any = row >= first
        real = tl.load(mask + b * T + row, mask=has_any, other=1) != 0
        row = tl.where(real, row, tl.load(links + (b * T + row) * 2, mask=has_any, other=-1))
    inside = row >= first
    depth = tl.where(inside, 0, 1)
    newest = (sequence + 1) * R
    if lane < G:
        _next_state_of_head(
            k_next, k, k_b, k_t, k_g, k_d, k_state, G, Dk, lane, N, row, inside, there, depth, first, sequence, there,
            newest, b, T, seq_idx, links, BACKWARD, BLOCK_K, ACC,
        )  # fmt: skip
    if v is not None:
        if lane >= G:
            _next_state_of_head(
                v_next, v, v_b, v_t, v_g, v_d, v_state, G, Dv, lane - G, N, row, inside, there, depth, first,
                sequence, there, newest, b, T, seq_idx, links, BACKWARD, BLOCK_V, ACC,
            )  # fmt: skip
