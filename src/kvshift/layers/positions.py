"""Positions of tokens, visibility of keys, rotary embedding and ALiBi.

Shapes: B batch, T positions, K keys, S sequences, H query heads, D head size. L is B, or 1 if all rows are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvshift.ops.boundaries import document_starts, sequence_of_positions


@dataclass(frozen=True)
class Positions:
    """The position of every token in its sequence.

    Attributes:
        document: index of the sequence in the pack, or of the document in the row, that contains the token, (L, T).
        rank: number of tokens before it in its document, including those of earlier calls, (L, T); -1 on padding.
    """

    document: Tensor
    rank: Tensor

    def followed_by(self, later: Positions) -> Positions:
        """Return the positions of these tokens followed by those of `later`."""
        return Positions(torch.cat([self.document, later.document], dim=1), torch.cat([self.rank, later.rank], dim=1))


def compute_positions(
    batch: int,
    length: int,
    device: torch.device,
    *,
    seen: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Positions, Tensor]:
    """Compute the positions of the tokens of a call.

    Args:
        batch: B.
        length: T.
        device: device of the results.
        seen: number of tokens that each sequence has seen before, (S,). None for none.
        cu_seqlens, seq_idx, mask: as in `kvshift.kv_shift`; at most one of the first two.

    Returns:
        The positions and the new `seen`. With `seq_idx`, the latter refers to the last document of each row.
    """
    order_T = torch.arange(length, device=device)
    if seen is None and cu_seqlens is None and seq_idx is None and mask is None:
        rank_LT = order_T.unsqueeze(0)
        return Positions(torch.zeros_like(rank_LT), rank_LT), torch.full((batch,), length, device=device)

    not_padding_BT = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
    before_BT = not_padding_BT.cumsum(1) - not_padding_BT.long()  # number of preceding real tokens of this call
    total_B = not_padding_BT.sum(1)
    if cu_seqlens is not None:
        bound = cu_seqlens.long()
        document_BT = sequence_of_positions(bound, length).unsqueeze(0)
        before_bound = torch.cat([before_BT[0], total_B])[bound]  # (S + 1,)
        seen_S = torch.zeros_like(bound[1:]) if seen is None else seen
        carried_BT = (seen_S - before_bound[:-1])[document_BT]
        seen_after = seen_S + before_bound.diff()
    else:
        seen_B = torch.zeros_like(total_B) if seen is None else seen
        document_BT, first_BT = torch.zeros_like(before_BT), torch.zeros_like(before_BT)
        if seq_idx is not None:
            starts_BT = document_starts(seq_idx, not_padding_BT)
            document_BT = starts_BT.cumsum(1)
            first_BT = torch.where(starts_BT, before_BT, 0).cummax(1).values
        # Only the first document of a row continues earlier calls.
        carried_BT = torch.where(document_BT == 0, seen_B.unsqueeze(1), 0) - first_BT
        last_document_B, last_first_B = (F.pad(x, (1, 0)).amax(1) for x in (document_BT, first_BT))
        seen_after = total_B - last_first_B + torch.where(last_document_B == 0, seen_B, 0)
    return Positions(document_BT, torch.where(not_padding_BT, before_BT + carried_BT, -1)), seen_after


def cached_positions(seen: Tensor, length: int, packed: bool) -> Positions:
    """Return the positions of the last `length` tokens of every sequence; ranks before its beginning are negative.

    Args:
        seen: number of tokens of each sequence, (S,).
        length: N.
        packed: whether to return one row, sequence after sequence, (1, S * N), instead of (S, N).
    """
    rank_SN = seen.unsqueeze(1) + torch.arange(-length, 0, device=seen.device)
    if not packed:
        return Positions(torch.zeros_like(rank_SN), rank_SN)
    document_SN = torch.arange(seen.shape[0], device=seen.device).unsqueeze(1).expand_as(rank_SN)
    return Positions(document_SN.reshape(1, -1), rank_SN.reshape(1, -1))


def visible_keys(queries: Positions, keys: Positions, window: int | None) -> Tensor:
    """Return the keys that each query attends to, (L, T, K) booleans.

        keys of the same document with  rank_q - window < rank_k <= rank_q

    Padding queries attend to everything, because softmax over nothing is NaN on some devices. Their output is dropped.
    """
    q_rank_LT1, k_rank_L1K = queries.rank.unsqueeze(2), keys.rank.unsqueeze(1)
    seen_LTK = (queries.document.unsqueeze(2) == keys.document.unsqueeze(1)) & (k_rank_L1K >= 0)
    seen_LTK = seen_LTK & (k_rank_L1K <= q_rank_LT1)
    if window is not None:
        seen_LTK = seen_LTK & (k_rank_L1K > q_rank_LT1 - window)
    return seen_LTK | (q_rank_LT1 < 0)


def rotary_table(positions: Tensor, size: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of  positions * base^(-2i / D),  i = 0 .. D/2 - 1.

    Args:
        positions: (L, T), integers or real numbers.
        size: D, even.
        base: base of the frequencies; 10,000 in RoFormer and Llama.
        dtype: dtype of the tensors to rotate. The table is in fp32, or in fp64 for fp64.

    Returns:
        Two tensors (L, T, 1, D/2).
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    frequency = 1.0 / base ** (torch.arange(0, size, 2, device=positions.device).to(compute) / size)
    angle = (positions.to(compute).unsqueeze(-1) * frequency).unsqueeze(2)
    return angle.cos(), angle.sin()


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of ALiBi, one for each query head.

        2^(-8 (h + 1) / H),  h = 0 .. H - 1,  if H is a power of two

    Otherwise, return the slopes for the largest power of two below H, followed by every other slope (the first, the
    third ...) for twice that power.

    Source:
        Press, Smith, Lewis: Train Short, Test Long, ICLR 2022, and the accompanying code.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]
