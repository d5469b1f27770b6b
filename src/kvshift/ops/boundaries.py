"""Where documents begin, and which tokens precede each token, given padding and document boundaries.

Shapes: B batch, T positions, S sequences, R rows of state, W window.

All of this is integer arithmetic on (B, T). It is cheap relative to the keys and values, and has no branches on data,
hence no synchronisation on a GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor


def document_starts(named: Tensor, real: Tensor | None, *, step: int = 0) -> Tensor:
    """Return where a document begins after another in its row, (B, T) booleans; the only definition of this rule.

        named[t] - named[s] is neither step nor step * (t - s)

    for a real position t, where s is the last real position before it.

    Args:
        named: (B, T) integers: numbers of the documents or, with `step` = 1, positions within them, in which padding
            may or may not be counted.
        real: (B, T), False on padding; None if there is no padding.
    """
    index_T = torch.arange(named.shape[1], device=named.device)
    if real is None:  # nothing has the size T - 1, for which torch.compile would assume that T is not 2
        previous_BT = torch.nn.functional.pad(named, (1, 0))[:, : named.shape[1]]
        return (index_T > 0) & (named != previous_BT + step)
    last_real_BT = torch.where(real, index_T, -1).cummax(1)[0]
    before_BT = torch.nn.functional.pad(last_real_BT, (1, 0), value=-1)[:, : named.shape[1]]
    moved_BT = named - named.gather(1, before_BT.clamp(min=0))
    return real & (before_BT >= 0) & (moved_BT != step) & (moved_BT != step * (index_T - before_BT))


def sequence_of_positions(cu_seqlens: Tensor, positions: int) -> Tensor:
    """Return the index of the sequence that contains each position of a pack, (P,), given its boundaries, (S + 1,)."""
    position_P = torch.arange(positions, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # A difference, not a view: for GPUs, torch.compile before 2.13 turns a search in x[1:] into one in x.
    last_S = cu_seqlens[1:] - 1
    return torch.searchsorted(last_S, position_P)


NO_ROW = -(2**31)
"""Marks, in a `ShiftPlan`, a lag that reads zeros, or a row that no position reads."""


class ShiftPlan(NamedTuple):
    """The rows that every output reads: the form in which all implementations receive boundaries.

    A row is identified by an int32: 0 .. T-1 is a position of the batch entry, and -1, -2, ... -Q is a row of its
    state, counted from the end (Q = R; for a pack Q = S * R, sequence after sequence). All tensors are contiguous.

    Attributes:
        sources: row that lag j of position t reads, or `NO_ROW`, (B, T, W).
        next_state: rows that make up the next state, or `NO_ROW`, (B, N).
        readers: inverse of `sources` for backward: the position whose lag j reads each of the Q rows of state and T
            positions, or `NO_ROW`, (B, Q + T, W). None if no gradients are needed.
    """

    sources: Tensor
    next_state: Tensor
    readers: Tensor | None


_SHARED = threading.local()
Arguments = ParamSpec("Arguments")


@contextmanager
def shared_plans(plans: dict[Any, Any] | None = None) -> Iterator[None]:
    """Within this context, in this thread, reuse plans for the same tensors, so that all layers of a model share one.

    Args:
        plans: dictionary to store the plans in; a new one if None.
    """
    outer = getattr(_SHARED, "plans", None)
    _SHARED.plans = {} if plans is None else plans
    try:
        yield
    finally:
        _SHARED.plans = outer


def _shareable(plan: Callable[Arguments, ShiftPlan]) -> Callable[Arguments, ShiftPlan]:
    """Let a function that makes plans reuse them within `shared_plans`."""

    @functools.wraps(plan)
    def shared(*args: Arguments.args, **boundaries: Arguments.kwargs) -> ShiftPlan:
        # A graph that depends on the dictionary would fit the first layer, or the others, and the tensors of one call.
        if torch.compiler.is_compiling() or getattr(_SHARED, "plans", None) is None:
            return plan(*args, **boundaries)
        key = (args, *((name, id(value)) for name, value in boundaries.items()))
        if key not in _SHARED.plans:
            _SHARED.plans[key] = plan(*args, **boundaries), boundaries  # kept so that no other tensor gets their ids
        return _SHARED.plans[key][0]

    return shared


@_shareable
def plan_shift(
    batch: int,
    positions: int,
    window: int,
    rows: int,
    device: torch.device,
    *,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    backward: bool = False,
) -> ShiftPlan:
    """Return the plan: for every token, the rows of the real tokens 1 .. W-1 places before it in its document.

    Args:
        batch, positions, window, rows: B (1 with `cu_seqlens`), T, W and R.
        device: device of the plan.
        cu_seqlens, seq_idx, mask: as in `kv_shift`; at most one of the first two.
        backward: whether gradients are needed.
    """
    position_T = torch.arange(positions, device=device)
    if mask is None:
        rank_BT, at_rank = position_T.expand(batch, -1), None
    else:
        rank_BT = mask.cumsum(1) - 1  # number of real tokens before a real token in its row
        spare = positions  # an extra column at the end takes the writes and reads of padding
        no_position = torch.full((batch, positions + 1), NO_ROW, dtype=torch.long, device=device)
        at_rank = no_position.scatter(1, torch.where(mask, rank_BT, spare), position_T.expand(batch, -1))
    real_before = torch.nn.functional.pad(rank_BT + 1, (1, 0))  # (B, T + 1): real tokens before each boundary

    if cu_seqlens is not None:
        sequence_T = sequence_of_positions(cu_seqlens, positions)
        bound_rank = real_before[:, cu_seqlens.long()]  # (1, S + 1)
        first_BT = bound_rank[:, sequence_T]
        slots = rows * (cu_seqlens.shape[0] - 1)
        state_BT = ((sequence_T + 1) * rows - slots).expand(batch, -1)  # one past the newest row of a token's state
        end_BS, first_BS = bound_rank[:, 1:], bound_rank[:, :-1]
        state_BS = torch.arange(1, cu_seqlens.shape[0], device=device).mul(rows).sub(slots).expand(batch, -1)
    else:
        first_BT = state_BT = torch.zeros_like(rank_BT)
        slots = rows
        end_BS = real_before[:, -1:]
        first_BS = state_BS = torch.zeros_like(end_BS)
        if seq_idx is not None:
            first_BT = torch.where(document_starts(seq_idx, mask), rank_BT, 0).cummax(1).values
            state_BT = torch.where(first_BT > 0, NO_ROW, 0)  # only the first document of a row continues its state
            first_BS = torch.cat([first_BS, first_BT], dim=1).amax(1, keepdim=True)
            state_BS = torch.where(first_BS > 0, NO_ROW, 0)

    def row_of(rank: Tensor, first: Tensor, state: Tensor) -> Tensor:
        """Return the row of the token with this rank; ranks below `first` refer to the state."""
        behind = rank - first.unsqueeze(2)  # -1 is the newest row of state
        from_state = (state.unsqueeze(2) + behind).clamp(min=NO_ROW)
        if at_rank is not None:
            index = torch.where(behind >= 0, rank, positions)
            rank = at_rank.gather(1, index.flatten(1)).view_as(index)
        return torch.where(behind >= 0, rank, from_state)

    earlier = row_of(rank_BT.unsqueeze(2) - torch.arange(1, window, device=device), first_BT, state_BT)
    sources = torch.cat([position_T[None, :, None].expand(batch, -1, 1), earlier], dim=2)
    if mask is not None:
        sources = torch.where(mask.unsqueeze(2), sources, NO_ROW)

    next_BSR = row_of(end_BS.unsqueeze(2) - torch.arange(rows, 0, -1, device=device), first_BS, state_BS)

    readers = None
    if backward:
        no_reader = torch.full((batch, slots + positions + 1, window), NO_ROW, dtype=torch.int, device=device)
        row = torch.where(sources >= -slots, sources + slots, slots + positions)
        readers = no_reader.scatter(1, row, position_T.int()[None, :, None].expand_as(row))[:, :-1].contiguous()
    return ShiftPlan(sources.int().contiguous(), next_BSR.flatten(1).int().contiguous(), readers)


def plan_without_boundaries(positions: int, window: int, rows: int, device: torch.device) -> ShiftPlan:
    """Return the plan, (1, T, W) and (1, R + T, W), for batch entries of one sequence each, without the next state."""
    sources = torch.arange(positions, device=device)[None, :, None] - torch.arange(window, device=device)
    readers = readers_without_boundaries(-rows, positions, positions, window, device)
    return ShiftPlan(sources, torch.empty(1, 0, dtype=torch.int, device=device), readers)


def readers_without_boundaries(start: int, end: int, positions: int, window: int, device: torch.device) -> Tensor:
    """Return the `readers` of rows start .. end - 1 if every batch entry is one sequence, (1, end - start, W)."""
    row = torch.arange(start, end, device=device)[None, :, None]
    reader = row + torch.arange(window, device=device)
    return torch.where(reader < positions, reader, NO_ROW)
