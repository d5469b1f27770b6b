"""The next token of generation on a GPU, in one launch: shift, QK-norm, rotary embedding, next state and cache.

A program computes one head of one sequence. Arithmetic is in float32, rounded once. At the position of the token,

    q_out[b, h]              = rotate(norm(q[b, h]))
    keys[b, g, position]     = rotate(norm(alpha[g, 0] k[b, g] + alpha[g, 1] k_state[b, g]));     k_state = k
    values[b, g, position]   = beta[g, 0] v[b, g] + beta[g, 1] v_state[b, g];                     v_state = v

Heads are adjacent, as projections return them. The position is the number `at` or, in a CUDA graph, the one in
`length`, which the last program to finish increments. For that, `ticket` counts the programs; it is 0 between launches.
Nothing is written beyond the end of the cache.

Shapes: B batch, H query heads, G KV heads, D head size.
"""

# pyright: reportGeneralTypeIssues=false
# To a type checker, a kernel that is called like a Python function never returns.

import triton
import triton.language as tl

from kvshift.ops.triton.forward import _add, _times


@triton.jit
def _mixed(x, state, weights, d, there):
    """Return weights[0] x + weights[1] state for elements d of a head, or x without weights; x becomes the state."""
    now = tl.load(x + d, mask=there, other=0.0)
    y = now.to(tl.float32)
    if weights is not None:
        before = tl.load(state + d, mask=there, other=0.0).to(tl.float32)
        y = _add(_times(y, tl.load(weights)), before, tl.load(weights + 1))
    if state is not None:
        tl.debug_barrier()  # a thread may store elements that another thread loads
        tl.store(state + d, now, mask=there)
    return y


@triton.jit
def _rotated(
    y, x, state, weights, scale, cos, sin, room,
    D: tl.constexpr, EPS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one head of q or k, in the two halves that the rotation pairs; write it if there is room."""
    d = tl.arange(0, BLOCK)
    there = d < HALF
    low = _mixed(x, state, weights, d, there)
    high = _mixed(x, state, weights, d + HALF, there)
    if scale is not None:
        inverse = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + EPS)
        low *= inverse * tl.load(scale + d, mask=there, other=0.0).to(tl.float32)
        high *= inverse * tl.load(scale + d + HALF, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + d, mask=there, other=1.0).to(tl.float32)
    s = tl.load(sin + d, mask=there, other=0.0).to(tl.float32)
    tl.store(y + d, (low * c - high * s).to(y.dtype.element_ty), mask=there & room)
    tl.store(y + d + HALF, (high * c + low * s).to(y.dtype.element_ty), mask=there & room)


@triton.jit(do_not_specialize=["at", "room", "q_b", "k_b", "v_b", "table_b"])
def next_token(
    q_out, q, k, v, cos, sin, keys, values, k_state, v_state, alpha, beta, q_scale, k_scale, length, ticket,
    at, room, q_b, k_b, v_b, table_b,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, EPS: tl.constexpr, SIN: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute one token per sequence.

    Args:
        room: number of tokens for which the cache has room.
        q_b, k_b, v_b: strides of the batch, in units of ALIGN elements, so that the compiler knows the alignment.
        table_b: the same of both tables; 0 if all sequences share a row.
        SIN: index of the first element of a row of `sin` that is read: D/2 where the first half is negated.
        BLOCK_K, BLOCK_V: powers of 2 that cover half a head of k, and a head of v.
    """
    lane = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    position = at.to(tl.int64)
    if length is not None:
        position = tl.load(length)
    fits = position < room
    cos += b * table_b * ALIGN
    sin += b * table_b * ALIGN + SIN
    half: tl.constexpr = D // 2
    if lane < H:
        y = q_out + (b * H + lane) * D
        _rotated(y, q + b * q_b * ALIGN + lane * D, None, None, q_scale, cos, sin, True, D, EPS, half, BLOCK_K)
    elif lane < H + G:
        g = lane - H
        y = keys + ((b * G + g) * room + position) * D
        k_weights = alpha
        if alpha is not None:
            k_weights = alpha + 2 * g
        k_before = k_state
        if k_state is not None:
            k_before = k_state + (b * G + g) * D
        _rotated(y, k + b * k_b * ALIGN + g * D, k_before, k_weights, k_scale, cos, sin, fits, D, EPS, half, BLOCK_K)
    else:
        g = lane - H - G
        y = values + ((b * G + g) * room + position) * Dv
        v_weights = beta
        if beta is not None:
            v_weights = beta + 2 * g
        v_before = v_state
        if v_state is not None:
            v_before = v_state + (b * G + g) * Dv
        d = tl.arange(0, BLOCK_V)
        there = d < Dv
        value = _mixed(v + b * v_b * ALIGN + g * Dv, v_before, v_weights, d, there)
        tl.store(y + d, value.to(y.dtype.element_ty), mask=there & fits)
    if ticket is not None:
        tl.debug_barrier()
        if tl.atomic_add(ticket, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:  # all have read `length`
            tl.store(length, position + 1)
            tl.store(ticket, 0)
