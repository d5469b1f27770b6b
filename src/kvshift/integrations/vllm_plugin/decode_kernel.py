"""A decoding step in one launch, which reads and writes raw rows and shifts keys and values.

Each program handles one head of one sequence. No other program writes a row of state that it reads, with one exception:
a prefix hit in a block that this batch fills. In that case the row is read from the pack, at the token with that slot.

Shapes: P positions in the pack, S sequences, H heads of keys and of values, D head size, W window.
"""

# pyright: reportGeneralTypeIssues=false
# Type checkers conclude that a kernel called like a Python function never returns.

import triton
import triton.language as tl

from kvshift.ops.triton.forward import _add, _times


@triton.jit
def _row_before(
    kv, rows, slots, table, first, position, column, in_head, P, kv_stride, page_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Load the raw row of the token at `position`, before the piece that begins at `first`; 0 before the sequence."""
    there = position >= 0
    in_table = tl.maximum(position, 0) // TOKENS
    block = tl.load(table + in_table, mask=there, other=0).to(tl.int64)
    at = tl.full((), -1, tl.int32)  # the token's index in the pack; -1 if it is not there
    if there & (in_table != first // TOKENS):
        slot = block * TOKENS + position % TOKENS
        for start in range(0, P, SCAN):
            t = start + tl.arange(0, SCAN)
            found = tl.load(slots + t, mask=t < P, other=-1) == slot
            at = tl.maximum(at, tl.max(tl.where(found, t, -1), 0))
    row = block * page_stride + position % TOKENS % ROWS
    of_page = tl.load(rows + row * NUMBERS + column, mask=in_head & there & (at < 0), other=0.0)
    of_pack = tl.load(kv + at.to(tl.int64) * kv_stride + column, mask=in_head & (at >= 0), other=0.0)
    return tl.where(at >= 0, of_pack, of_page).to(tl.float32)


@triton.jit(do_not_specialize=["P", "table_stride"])
def decode(
    shifted, kv, rows, weights, slots, seq_lens, block_table, P, kv_stride, table_stride, page_stride,
    Q: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Shift Q tokens of each sequence and store their raw rows; a token without a slot is shifted but not stored."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    in_head = d < D
    column = head * D + d
    weights += head * W
    table = block_table + sequence.to(tl.int64) * table_stride
    first = tl.load(seq_lens + sequence) - Q
    begin = sequence.to(tl.int64) * Q
    for q in tl.static_range(Q):
        now = tl.load(kv + (begin + q) * kv_stride + column, mask=in_head, other=0.0).to(tl.float32)
        total = _times(now, tl.load(weights))
        for lag in tl.static_range(1, W):
            if lag <= q:
                term = tl.load(kv + (begin + q - lag) * kv_stride + column, mask=in_head, other=0.0).to(tl.float32)
            else:
                term = _row_before(
                    kv, rows, slots, table, first, first + (q - lag), column, in_head, P, kv_stride, page_stride,
                    TOKENS, ROWS, H * D, SCAN,
                )  # fmt: skip
            total = _add(total, term, tl.load(weights + lag))
        tl.store(shifted + (begin + q) * (H * D) + column, total.to(shifted.dtype.element_ty), mask=in_head)
    tl.debug_barrier()  # a thread may store elements that another thread loads
    for q in tl.static_range(Q):
        slot = tl.load(slots + begin + q)
        row = slot // TOKENS * page_stride + slot % TOKENS % ROWS
        raw = tl.load(kv + (begin + q) * kv_stride + column, mask=in_head, other=0.0)
        tl.store(rows + row * (H * D) + column, raw, mask=in_head & (slot >= 0))
