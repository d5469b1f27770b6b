"""The operator by plain PyTorch operations, for whoever follows a call one by one: see `watched.needs_traceable_ops`.

No autograd function, nothing in place, no branch on data: tracers record it, `torch.func` transforms it, forward-mode
AD differentiates it. The bits are those of `eager.py`; it is slower and keeps more for backward.

Shapes: B batch, T positions, S sequences, R rows of state, Q rows of state per batch entry, H query heads, G KV
heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvshift.ops.boundaries import ShiftPlan


def shift_plain(
    inputs: Sequence[Tensor],
    all_coefficients: Sequence[Tensor | None],
    states: Sequence[Tensor],
    plan: ShiftPlan | None,
) -> list[Tensor]:
    """What `shift_eager` does, with the same arguments."""
    sources = None if plan is None else plan.sources
    return [
        x if coefficients is None else weighted_sum(x, coefficients, state, sources).to(x.dtype)
        for x, coefficients, state in zip(inputs, all_coefficients, states, strict=True)
    ]


def weighted_sum(x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None) -> Tensor:
    """The sum of the lags, in the dtype of the arithmetic; `sources` as in a `ShiftPlan`, None without boundaries."""
    batch, length = x.shape[:2]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = coefficients.to(dtype).unsqueeze(2).unbind(1)
    if batch * length == 0:  # no token to look up
        return x.to(dtype) * weights[0]
    rows = torch.cat([by_batch(state, x), x], dim=1).to(dtype)
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


def state_after(x: Tensor, state: Tensor, plan: ShiftPlan | None, max_rows: int) -> Tensor:
    """The last rows of each sequence, state included, in memory of their own.

    Args:
        x, state: one of the inputs of `shift_eager` and its state; plan: as there.
        max_rows: how many to return at most; with a plan it is always R.
    """
    if plan is None:
        return _newest(x, state, max_rows)
    if x.shape[0] * x.shape[1] == 0:
        return state.clone()
    return rows_at(x, by_batch(state, x), plan.next_state).reshape(state.shape)


def _newest(x: Tensor, state: Tensor, rows: int) -> Tensor:
    """The last rows of state and x together, in memory of their own.

    A view would keep all of x alive, and follow when the caller fills the same x with the next token.
    """
    length, held = x.shape[1], state.shape[1]
    if torch.compiler.is_compiling() and held == rows:  # one program, however many of the rows are new
        t = torch.arange(length - rows, length, device=x.device)
        before = state[:, (t + held).clamp(max=held - 1)]
        return torch.where((t >= 0)[:, None, None], x[:, t.clamp(min=0)], before)
    if length < rows:
        return torch.cat([state, x], dim=1)[:, -rows:]
    return x[:, length - rows :].clone()


def by_batch(state: Tensor, x: Tensor) -> Tensor:
    """(S, R, ...) as (B, Q, ...): the sequences of a pack one after another, those of batch entries as they are."""
    return state.reshape(x.shape[0], state.shape[0] // x.shape[0] * state.shape[1], *state.shape[2:])


def rows_at(x: Tensor, state_BQGD: Tensor, index: Tensor) -> Tensor:
    """The rows that a `ShiftPlan` numbers so: (B, n, G, D)."""
    slots = state_BQGD.shape[1]
    in_state = torch.where(index < slots, index, -1)
    return torch.where(index[..., None, None] >= slots, pick(x, index - slots), pick(state_BQGD, in_state))


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i]], and zero where index is negative; whatever stands in x elsewhere, NaN too, cannot matter."""
    batch = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return torch.where(index[..., None, None] >= 0, x[batch, index.clamp(min=0)], 0)


def shift_norm_rope_plain(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    k_state: Tensor | None,
    v_state: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    eps: float,
    sources: Tensor | None,
    sequences: int,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Shift, QK-norm and RoPE; arguments as of `triton.launch.shift`, and `sources` as of `weighted_sum`."""

    def shifted(x: Tensor, coefficients: Tensor | None, state: Tensor | None) -> Tensor:
        if coefficients is None:
            return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        if state is None:
            state = x.new_zeros(sequences, coefficients.shape[1] - 1, *x.shape[2:])
        return weighted_sum(x, coefficients, state, sources)

    def finished(y: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * scale.to(y.dtype)
        if cos is None or sin is None:
            return y
        c, s = cos.to(y.dtype).unsqueeze(2), sin.to(y.dtype).unsqueeze(2)
        low, high = y.chunk(2, dim=-1)
        return torch.cat([low * c - high * s, high * c + low * s], dim=-1)

    q_out = None if q is None else finished(shifted(q, None, None), q_scale).to(q.dtype)
    return q_out, finished(shifted(k, alpha, k_state), k_scale).to(k.dtype), shifted(v, beta, v_state).to(v.dtype)


def gradients_of_shift(
    x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, coefficients and state, in a backward pass that is watched."""

    def forward(x: Tensor, coefficients: Tensor, state: Tensor) -> Tensor:
        return weighted_sum(x, coefficients, state, sources).to(x.dtype)

    return cast(Any, tuple(gradients(forward, (x, coefficients, state), grad_y)))


def gradients(function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Any) -> list[Tensor | None]:
    """Of `function` at its inputs, from those of its results; None for those that are None."""

    def of_tensors(*tensors: Tensor) -> Any:
        left = iter(tensors)
        return function(*(None if x is None else next(left) for x in inputs))

    pull = cast(Any, torch.func.vjp(of_tensors, *(x for x in inputs if x is not None)))[1]
    pulled = iter(pull(grads))
    return [None if x is None else next(pulled) for x in inputs]
