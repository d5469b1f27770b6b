"""The operator by plain PyTorch operations, for whoever follows a call one by one: see `watched.is_watched`.

No autograd function, nothing in place, no branch on data: tracers record it, `torch.func` transforms it, forward-mode
AD differentiates it. The bits are those of `eager.py`; it is slower and keeps more for backward.

Shapes: B batch, T positions, S sequences, R rows of history, Q rows of history per batch row, H query heads, G KV
heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvshift.ops.boundaries import ShiftPlan


def shift_plain(
    x: Tensor, mix: Tensor | None, history: Tensor, plan: ShiftPlan | None, max_rows: int
) -> tuple[Tensor, Tensor]:
    """What `shift_eager` does, with the same arguments and results."""
    y = x if mix is None else mixed(x, mix, history, None if plan is None else plan.sources).to(x.dtype)
    return y, next_history(x, history, plan, max_rows)


def mixed(x: Tensor, mix: Tensor, history: Tensor, sources: Tensor | None) -> Tensor:
    """The sum of the lags, in the dtype of the arithmetic; `sources` as in a `ShiftPlan`, None without boundaries."""
    batch, length = x.shape[:2]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = mix.to(dtype).unsqueeze(2).unbind(1)
    if batch * length == 0:  # no token to look up
        return x.to(dtype) * weights[0]
    rows = torch.cat([by_batch(history, x), x], dim=1).to(dtype)
    slots = rows.shape[1] - length
    total = None
    for lag, weight in enumerate(weights):
        span = slice(slots - lag, slots - lag + length)
        total = _add(total, rows[:, span] if sources is None else pick(rows, sources[:, :, lag]), weight)
    return cast(Tensor, total)


def _add(total: Tensor | None, term: Tensor, weight: Tensor) -> Tensor:
    """total + weight * term; where weight is zero, every bit of total, whatever the term.

    The derivative by the weight is the term there too: a `where` by itself would cut it, and an infinity in the branch
    that is not taken would make it NaN.
    """
    zero = weight == 0
    term = torch.where(zero & ~term.isfinite(), 0, term)
    product = weight * term
    nothing = product.detach() - product  # is 0, and has the derivative
    if total is None:
        return torch.where(zero, 0 - nothing, product)
    return torch.where(zero, total - nothing, torch.addcmul(total, term, weight))


def next_history(x: Tensor, history: Tensor, plan: ShiftPlan | None, max_rows: int) -> Tensor:
    """The last rows of each sequence, history included, in memory of their own; arguments as in `shift_eager`."""
    if plan is None:
        return _newest(x, history, max_rows)
    if x.shape[0] * x.shape[1] == 0:
        return history.clone()
    return rows_at(x, by_batch(history, x), plan.tails).reshape(history.shape)


def _newest(x: Tensor, history: Tensor, rows: int) -> Tensor:
    """The last rows of history and x together, in memory of their own.

    A view would keep all of x alive, and follow when the caller fills the same x with the next token.
    """
    length, held = x.shape[1], history.shape[1]
    if torch.compiler.is_compiling() and held == rows:  # one program, however many of the rows are new
        t = torch.arange(length - rows, length, device=x.device)
        past = history[:, (t + held).clamp(max=held - 1)]
        return torch.where((t >= 0)[:, None, None], x[:, t.clamp(min=0)], past)
    if length < rows:
        return torch.cat([history, x], dim=1)[:, -rows:]
    return x[:, length - rows :].clone()


def by_batch(history: Tensor, x: Tensor) -> Tensor:
    """(S, R, ...) as (B, Q, ...): the sequences of a pack one after another, those of batch rows as they are."""
    return history.reshape(x.shape[0], history.shape[0] // x.shape[0] * history.shape[1], *history.shape[2:])


def rows_at(x: Tensor, past: Tensor, index: Tensor) -> Tensor:
    """The rows that a `ShiftPlan` numbers so: (B, n, G, D)."""
    slots = past.shape[1]
    in_past = torch.where(index < slots, index, -1)
    return torch.where(index[..., None, None] >= slots, pick(x, index - slots), pick(past, in_past))


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i]], and zero where index is negative; whatever stands in x elsewhere, NaN too, cannot matter."""
    batch = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return torch.where(index[..., None, None] >= 0, x[batch, index.clamp(min=0)], 0)


def turn_plain(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    k_past: Tensor | None,
    v_past: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    eps: float,
    sources: Tensor | None,
    sequences: int,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Shift, QK-norm and rotary embedding; arguments as of `triton.launch.shift`, and `sources` as of `mixed`."""

    def shifted(x: Tensor, mix: Tensor | None, past: Tensor | None) -> Tensor:
        if mix is None:
            return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        history = x.new_zeros(sequences, mix.shape[1] - 1, *x.shape[2:]) if past is None else past
        return mixed(x, mix, history, sources)

    def finished(y: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * scale.to(y.dtype)
        if cos is None or sin is None:
            return y
        c, s = cos.to(y.dtype).unsqueeze(2), sin.to(y.dtype).unsqueeze(2)
        low, high = y.chunk(2, dim=-1)
        return torch.cat([low * c - high * s, high * c + low * s], dim=-1)

    q_out = None if q is None else finished(shifted(q, None, None), q_scale).to(q.dtype)
    return q_out, finished(shifted(k, alpha, k_past), k_scale).to(k.dtype), shifted(v, beta, v_past).to(v.dtype)


def mixed_gradients(
    x: Tensor, mix: Tensor, history: Tensor, sources: Tensor | None, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, mix and history, in a backward pass that is watched."""

    def forward(x: Tensor, mix: Tensor, history: Tensor) -> Tensor:
        return mixed(x, mix, history, sources).to(x.dtype)

    return cast(Any, tuple(gradients(forward, (x, mix, history), grad_y)))


def gradients(function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Any) -> list[Tensor | None]:
    """Of `function` at its inputs, from those of its results; None for those that are None."""

    def of_tensors(*tensors: Tensor) -> Any:
        left = iter(tensors)
        return function(*(None if x is None else next(left) for x in inputs))

    pull = cast(Any, torch.func.vjp(of_tensors, *(x for x in inputs if x is not None)))[1]
    pulled = iter(pull(grads))
    return [None if x is None else next(pulled) for x in inputs]
