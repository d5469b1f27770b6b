"""Selective attention, on whole matrices and in blocks of queries whose memory is linear in the context length.

    Z = Q K^T / sqrt(D),  S = relu(Z of head 0), 0 for a token's own key and for the first of its document
    F[i, j] = sum of S[m, j] over the queries m < i of its document                        axis "query", as published
    F[i, j] = sum of S[p, n] over the keys n <= j, p the token before i                    axis "key"
    output = softmax(Z - F) V                                                              in every head

S determines how much less later tokens attend to each key. Both sums are over the rows S[p(i), :], where p(i) is
the token before i: down the queries or along the keys.

With blocks of queries a .. b, the sum down the queries is carried from block to block as C,

    F[i, :] = C_a + sum over a <= m <= i of S[p(m), :],        C_b = C_a + sum over a <= m < b of S[p(m), :]

Backward goes from the last block to the first. It recomputes each block, subtracts the block's sum from C_b, and
carries the sum of dF over later queries for the gradient of S: dS[p(i), :] = sum over m >= i of dF[m, :]. C is float64,
so that the subtraction recovers C_a to a relative error of 1e-16. Forward saves no T x T matrix, only q, k, v, C and,
for each i, its document, p(i) and the query of head 0 at p(i).

Source: Leviathan et al., Selective attention improves transformer (2024), section 3. Axis "key": the code that the
KV-shift paper cites for its Table 13 (fangyuan-ksgk/selective-attention-transformer, model/model.py).

Shapes: B batch, T positions, H query heads, G KV heads, R = H / G, D head size; n queries of a block, s keys up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Axis = Literal["query", "key"]

_BLOCK = 64  # queries


class _Order(NamedTuple):
    """The document and the previous token of each position, both (B, T).

    Attributes:
        document: number of the document; each position of padding has a unique number.
        before: index of the previous token in the document, -1 for its first token and on padding.
    """

    document: Tensor
    before: Tensor

    @classmethod
    def of(cls, like: Tensor, mask: Tensor | None, seq_idx: Tensor | None) -> _Order:
        batch, _, length, _ = like.shape
        index_T = torch.arange(length, device=like.device)
        not_padding_BT = torch.ones(batch, length, dtype=torch.bool, device=like.device) if mask is None else mask
        named_BT = torch.zeros_like(not_padding_BT, dtype=torch.long) if seq_idx is None else seq_idx.long()
        document_BT = torch.where(not_padding_BT, named_BT, -1 - index_T)
        last_BT = torch.where(not_padding_BT, index_T, -1).cummax(1).values
        before_BT = F.pad(last_BT[:, :-1], (1, 0), value=-1)
        same_BT = not_padding_BT & (before_BT >= 0) & (document_BT.gather(1, before_BT.clamp(min=0)) == document_BT)
        return cls(document_BT, torch.where(same_BT, before_BT, -1))

    def visible(self, start: int, stop: int) -> Tensor:
        """Return which keys the queries start .. stop attend to, (B, n, s)."""
        index = torch.arange(stop, device=self.document.device)
        same = self.document[:, start:stop, None] == self.document[:, None, :stop]
        return same & (index[None, :] <= index[start:, None])

    def choosable(self, start: int, stop: int) -> Tensor:
        """Return which keys the tokens before these queries may select, (B, n, s)."""
        index = torch.arange(stop, device=self.document.device)
        earlier = index[None, :] < self.before[:, start:stop, None]
        return self.visible(start, stop) & earlier & (self.before[:, None, :stop] >= 0)


def selective_attention_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    axis: Axis = "query",
    mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute the formula above on T x T matrices.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, T, D), H a multiple of G.
        scaling: factor that replaces 1 / sqrt(D).
        axis: axis along which S is summed.
        mask, seq_idx: (B, T), as in `kvshift.kv_shift`; a position of padding attends to itself.
        dropout: dropout rate of the weights.

    Returns:
        (B, H, T, D) in the dtype of v, and the weights, (B, H, T, T).
    """
    order, length = _Order.of(q, mask, seq_idx), q.shape[2]
    groups = q.shape[1] // k.shape[1]
    k_BHTD, v_BHTD = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores_BHTT = _wide(q @ k_BHTD.mT) * scaling
    before_BT1 = order.before.clamp(min=0).unsqueeze(2).expand(-1, -1, length)
    chosen_BTT = torch.where(order.choosable(0, length), scores_BHTT[:, 0].gather(1, before_BT1).relu(), 0)
    masked_BHTT = scores_BHTT - chosen_BTT.cumsum(1 if axis == "query" else 2).unsqueeze(1)
    masked_BHTT = masked_BHTT.masked_fill(~order.visible(0, length).unsqueeze(1), -torch.inf)
    weights_BHTT = F.dropout(masked_BHTT.softmax(-1).to(v.dtype), dropout)
    return weights_BHTT @ v_BHTD, weights_BHTT


def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    axis: Axis = "query",
    mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    block: int = _BLOCK,
) -> Tensor:
    """Compute the output of `selective_attention_full` in blocks of queries, which backward recomputes.

    Args:
        q, k, v, scaling, axis, mask, seq_idx: as in `selective_attention_full`.
        block: queries per block; beyond the output, memory is needed for a few tensors (B, H, block, T).
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    order = _Order.of(q, mask, seq_idx)
    before_BTD = order.before.clamp(min=0).unsqueeze(2).expand(-1, -1, q.shape[3])
    with torch.autocast(device, enabled=False):
        return _Blocks.apply(q, q[:, 0].gather(1, before_BTD), k, v, order, scaling, axis, block)  # type: ignore[return-value]


class _Block(NamedTuple):
    """Queries start .. stop of all heads, the head-0 queries of the tokens before them, and keys and values so far."""

    start: int
    stop: int
    q: Tensor  # (B, G, R n, D)
    chooser: Tensor  # (B, n, D)
    k: Tensor  # (B, G, s, D)
    v: Tensor

    def sample_distinct(self, order: _Order, scaling: float) -> Tensor:
        """Return S of the tokens before the block's queries, (B, n, s)."""
        scores_Bns = _wide(self.chooser @ self.k[:, 0].mT).mul_(scaling).relu_()
        return scores_Bns.masked_fill_(~order.choosable(self.start, self.stop), 0)

    def weights(self, sample_distinct: Tensor, carried: Tensor | None, order: _Order, scaling: float) -> Tensor:
        """Return the weights, (B, H, n, s), given S and, for the sum down the queries, C_a (B, s)."""
        batch, n, s = sample_distinct.shape
        total = (
            sample_distinct.cumsum(2) if carried is None else sample_distinct.double().cumsum(1) + carried.unsqueeze(1)
        )
        scores = _wide(self.q @ self.k.mT).mul_(scaling).view(batch, -1, n, s)
        scores -= total.unsqueeze(1).to(scores.dtype)
        return scores.masked_fill_(~order.visible(self.start, self.stop).unsqueeze(1), -torch.inf).softmax(-1)


def _blocks(starts: Iterable[int], q: Tensor, chooser: Tensor, k: Tensor, v: Tensor, size: int) -> Iterator[_Block]:
    for start in starts:
        stop = min(start + size, q.shape[2])
        q_BGnD = q[:, :, start:stop].reshape(len(q), k.shape[1], -1, q.shape[3])
        yield _Block(start, stop, q_BGnD, chooser[:, start:stop], k[:, :, :stop], v[:, :, :stop])


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        chooser: Tensor,
        k: Tensor,
        v: Tensor,
        order: _Order,
        scaling: float,
        axis: Axis,
        size: int,
    ) -> Tensor:
        batch, heads, length, _ = q.shape
        out = v.new_empty(batch, heads, length, v.shape[3])
        carried = torch.zeros(batch, length, dtype=torch.float64, device=q.device) if axis == "query" else None
        for block in _blocks(range(0, length, size), q, chooser, k, v, size):
            sample_distinct = block.sample_distinct(order, scaling)
            before = None if carried is None else carried[:, : block.stop]
            weights = block.weights(sample_distinct, before, order, scaling).to(v.dtype)
            of_heads = weights.view(*block.q.shape[:3], -1) @ block.v
            out[:, :, block.start : block.stop] = of_heads.view(batch, heads, -1, v.shape[3])
            if before is not None:
                before += sample_distinct.sum(1, dtype=torch.float64)
        ctx.save_for_backward(q, chooser, k, v, carried, *order)
        ctx.rest = scaling, size
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # PyTorch's once_differentiable raises nothing in `autograd.grad(..., inputs)`, which prunes its error node.
            raise RuntimeError("selective_attention has no second derivative; selective_attention_full has one")
        q, chooser, k, v, carried, *places = ctx.saved_tensors
        (scaling, size), order = ctx.rest, _Order(*places)
        carried = None if carried is None else carried.clone()  # backward may run more than once
        after = None if carried is None else torch.zeros_like(carried)
        dq, d_chooser = torch.empty_like(q), torch.empty_like(chooser)
        dk, dv = (torch.zeros_like(x, dtype=_wide_dtype(x)) for x in (k, v))
        with torch.autocast(q.device.type, enabled=False):
            for block in _blocks(reversed(range(0, q.shape[2], size)), q, chooser, k, v, size):
                at, upto = slice(block.start, block.stop), slice(0, block.stop)
                sample_distinct = block.sample_distinct(order, scaling)
                before = None if carried is None else carried[:, upto].sub_(sample_distinct.sum(1, dtype=torch.float64))
                weights = block.weights(sample_distinct, before, order, scaling)
                folded = (*block.q.shape[:3], -1)  # merges the query heads of a KV head with the queries
                grad_BGnD = grad[:, :, at].reshape(folded)
                dv[:, :, upto] += weights.to(v.dtype).view(folded).mT @ grad_BGnD
                d_scores = _wide(grad_BGnD @ block.v.mT).view(weights.shape)
                d_scores -= (d_scores * weights).sum(-1, keepdim=True)
                d_scores *= weights
                d_total = -d_scores.sum(1, dtype=torch.float64)
                if after is None:
                    d_chosen = d_total.flip(2).cumsum(2).flip(2)
                else:
                    d_chosen = d_total.flip(1).cumsum(1).flip(1) + after[:, None, upto]
                    after[:, upto] += d_total.sum(1)
                d_chosen = torch.where(sample_distinct > 0, d_chosen, 0).mul_(scaling).to(q.dtype)
                d_scores = d_scores.mul_(scaling).to(q.dtype).view(folded)
                dq[:, :, at] = (d_scores @ block.k).view(grad[:, :, at].shape[:3] + q.shape[3:])
                d_chooser[:, at] = d_chosen @ block.k[:, 0]
                dk[:, :, upto] += d_scores.mT @ block.q
                dk[:, 0, upto] += d_chosen.mT @ block.chooser
        return dq, d_chooser, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))
