"""Selective attention, whole and in blocks of queries whose memory grows with the context, not with its square.

    Z = Q K^T / sqrt(D),  S = relu(Z of head 0), 0 for a token's own key and for the first of its document
    F[i, j] = sum of S[m, j] over the queries m < i of its document                        axis "query", as published
    F[i, j] = sum of S[p, n] over the keys n <= j, p the token before i                    axis "key"
    output = softmax(Z - F) V                                                              in every head

A token chooses by S what the tokens after it are to see less of. Both sums are of the rows S[p(i), :], p(i) the token
before i: down the queries or along the keys.

In blocks of queries a .. b the sum down the queries is carried,

    F[i, :] = C_a + sum over a <= m <= i of S[p(m), :],        C_b = C_a + sum over a <= m < b of S[p(m), :]

and backward, from the last block to the first, computes each block again, takes its sum off C_b, and carries the sum of
dF over the queries after it, which is what the block's S is due: dS[p(i), :] = sum over m >= i of dF[m, :]. C is in
float64, so that taking off returns C_a to 1e-16 of it. Kept for backward are q, k, v and C alone.

Source: Leviathan et al., Selective attention improves transformer (2024), section 3. Axis "key": the code that the
KV-shift paper names for its Table 13 (fangyuan-ksgk/selective-attention-transformer, model/model.py).

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
    """Who stands where, each (B, T).

    Attributes:
        document: its number; of each position of padding another.
        before: the token before in its document, -1 for the first and on padding.
    """

    document: Tensor
    before: Tensor

    @classmethod
    def of(cls, like: Tensor, mask: Tensor | None, seq_idx: Tensor | None) -> _Order:
        batch, _, length, _ = like.shape
        index_T = torch.arange(length, device=like.device)
        real_BT = torch.ones(batch, length, dtype=torch.bool, device=like.device) if mask is None else mask
        named_BT = torch.zeros_like(real_BT, dtype=torch.long) if seq_idx is None else seq_idx.long()
        document_BT = torch.where(real_BT, named_BT, -1 - index_T)
        last_BT = torch.where(real_BT, index_T, -1).cummax(1).values
        before_BT = F.pad(last_BT[:, :-1], (1, 0), value=-1)
        same_BT = real_BT & (before_BT >= 0) & (document_BT.gather(1, before_BT.clamp(min=0)) == document_BT)
        return cls(document_BT, torch.where(same_BT, before_BT, -1))

    def visible(self, start: int, stop: int) -> Tensor:
        """(B, n, s): which keys the queries start .. stop attend to."""
        index = torch.arange(stop, device=self.document.device)
        same = self.document[:, start:stop, None] == self.document[:, None, :stop]
        return same & (index[None, :] <= index[start:, None])

    def choosable(self, start: int, stop: int) -> Tensor:
        """(B, n, s): which keys the tokens before these queries may choose."""
        index = torch.arange(stop, device=self.document.device)
        earlier = index[None, :] < self.before[:, start:stop, None]
        return self.visible(start, stop) & earlier & (self.before[:, None, :stop] >= 0)


def selective_attention_whole(
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
    """The formula above on matrices of T x T.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, T, D), H a multiple of G.
        scaling: in place of 1 / sqrt(D).
        axis: of the sum.
        mask, seq_idx: (B, T), as in `kvshift.kv_shift`; a position of padding attends to itself.
        dropout: of the weights.

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
    """What `selective_attention_whole` returns first, in blocks of queries; each is computed again in backward.

    Args:
        q, k, v, scaling, axis, mask, seq_idx: as there.
        block: how many queries; memory beyond the output is that of some (B, H, block, T).
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    order = _Order.of(q, mask, seq_idx)
    before_BTD = order.before.clamp(min=0).unsqueeze(2).expand(-1, -1, q.shape[3])
    with torch.autocast(device, enabled=False):
        return _Blocks.apply(q, q[:, 0].gather(1, before_BTD), k, v, order, scaling, axis, block)  # type: ignore[return-value]


class _Block(NamedTuple):
    """Queries start .. stop of all heads, and of the tokens before them in head 0; keys and values up to them."""

    start: int
    stop: int
    q: Tensor  # (B, G, R n, D)
    chooser: Tensor  # (B, n, D)
    k: Tensor  # (B, G, s, D)
    v: Tensor

    def chosen(self, order: _Order, scaling: float) -> Tensor:
        """S of the tokens before, (B, n, s)."""
        scores_Bns = _wide(self.chooser @ self.k[:, 0].mT).mul_(scaling).relu_()
        return scores_Bns.masked_fill_(~order.choosable(self.start, self.stop), 0)

    def weights(self, chosen: Tensor, carried: Tensor | None, order: _Order, scaling: float) -> Tensor:
        """(B, H, n, s), from S and, where it is summed down the queries, C_a (B, s)."""
        batch, n, s = chosen.shape
        total = chosen.cumsum(2) if carried is None else chosen.double().cumsum(1) + carried.unsqueeze(1)
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
            chosen = block.chosen(order, scaling)
            before = None if carried is None else carried[:, : block.stop]
            weights = block.weights(chosen, before, order, scaling).to(v.dtype)
            of_heads = weights.view(*block.q.shape[:3], -1) @ block.v
            out[:, :, block.start : block.stop] = of_heads.view(batch, heads, -1, v.shape[3])
            if before is not None:
                before += chosen.sum(1, dtype=torch.float64)
        ctx.save_for_backward(q, chooser, k, v, carried, *order)
        ctx.rest = scaling, size
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # PyTorch's once_differentiable says nothing to `autograd.grad(..., inputs)`, which prunes its error.
            raise RuntimeError("selective_attention has no second derivative; selective_attention_whole has one")
        q, chooser, k, v, carried, *places = ctx.saved_tensors
        (scaling, size), order = ctx.rest, _Order(*places)
        carried = None if carried is None else carried.clone()  # backward may be asked for again
        after = None if carried is None else torch.zeros_like(carried)
        dq, d_chooser = torch.empty_like(q), torch.empty_like(chooser)
        dk, dv = (torch.zeros_like(x, dtype=_wide_dtype(x)) for x in (k, v))
        with torch.autocast(q.device.type, enabled=False):
            for block in _blocks(reversed(range(0, q.shape[2], size)), q, chooser, k, v, size):
                at, upto = slice(block.start, block.stop), slice(0, block.stop)
                chosen = block.chosen(order, scaling)
                before = None if carried is None else carried[:, upto].sub_(chosen.sum(1, dtype=torch.float64))
                weights = block.weights(chosen, before, order, scaling)
                folded = (*block.q.shape[:3], -1)  # heads of one KV head and their queries, one after the other
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
                d_chosen = torch.where(chosen > 0, d_chosen, 0).mul_(scaling).to(q.dtype)
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
