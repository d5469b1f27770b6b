"""The operator in plain PyTorch: any device, any strides, traced without graph breaks.

Shapes: B batch, T positions, S sequences, R rows of history, Q rows of history per batch row, G KV heads,
D head size, W window, n positions of a block.

Without boundaries a lag is a slice (`_Slices`); with padding or documents it is a gather along a `ShiftPlan`
(`_Gather`). Either works through the positions in blocks that stay in the processor's cache: one pass over memory
forward, one backward, nothing kept for backward but the inputs, no temporary larger than a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvshift.ops.plan import ShiftPlan

# Elements of a block: large enough that calls cost little, small enough that its temporaries stay in the cache.
_BLOCK = 2**19


def shift_eager(
    x: Tensor, mix: Tensor | None, history: Tensor, plan: ShiftPlan | None, max_rows: int
) -> tuple[Tensor, Tensor]:
    """Mix every token with those before it in its sequence.

        y[t] = mix[0] * x[t] + mix[1] * x[t-1] + ... + mix[W-1] * x[t-W+1]

    Args:
        x: (B, T, G, D).
        mix: (G, W); None returns x as it is.
        history: (S, R, G, D), the rows before each sequence, R >= W - 1.
        plan: who reads whom; None where every row of x is one piece of one sequence, without padding.
        max_rows: how many rows of history to return at most; with a plan it is always R.

    Returns:
        y like x, and the next history.
    """
    if mix is None:
        y = x
    elif x.shape[0] * x.shape[1] == 0:  # no token to look up or to sum over
        y = _mix_terms([x], _weights(mix, x)[:1]).to(x.dtype)
    else:
        y = _shift_slices(x, mix, history) if plan is None else _shift_gathered(x, mix, history, plan)
    return y, next_history(x, history, plan, max_rows)


def next_history(x: Tensor, history: Tensor, plan: ShiftPlan | None, max_rows: int) -> Tensor:
    """The last rows of each sequence, history included, in memory of their own; arguments as in `shift_eager`."""
    if plan is None:
        return _newest(x, history, max_rows)
    if x.shape[0] * x.shape[1] == 0:
        return history.clone()
    return _rows(x, _by_batch(history, x), plan.tails).reshape(history.shape)


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


def _tracked(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def _shift_slices(x: Tensor, mix: Tensor, history: Tensor) -> Tensor:
    forward = _Slices.apply if _tracked(x, mix, history) else _slices_forward
    return forward(x, mix, history)


def _shift_gathered(x: Tensor, mix: Tensor, history: Tensor, plan: ShiftPlan) -> Tensor:
    if _tracked(x, mix, history):
        return _Gather.apply(x, mix, history, plan.sources, plan.readers)
    return _gather_forward(x, mix, history, plan.sources)


class _Slices(torch.autograd.Function):
    """Every row of x is one piece of one sequence, and history the rows before it."""

    @staticmethod
    def forward(x: Tensor, mix: Tensor, history: Tensor) -> Tensor:
        return _slices_forward(x, mix, history)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, mix, history = ctx.saved_tensors
        weights = _weights(mix, x)
        dtype, lags = weights[0].dtype, len(weights) - 1
        partial_sums: list[list[Tensor]] = [[] for _ in weights]  # by lag: (G, D) of each span
        products = torch.empty(0, dtype=dtype, device=x.device)  # one room for all blocks: new pages cost more

        def block(start: int, end: int, out: Tensor | None) -> Tensor:
            g = grad_y[:, start : end + lags].to(dtype)  # the last block has nothing to look ahead to
            x_window = x[:, max(0, start - lags) : end].to(dtype)
            grad_block = torch.mul(g[:, : end - start], weights[0], out=out)
            for lag, weight in enumerate(weights[1:], 1):
                later = g[:, lag : lag + end - start]
                grad_block[:, : later.shape[1]].addcmul_(later, weight)
            for lag, span, source in _spans(x_window, history, start, end, lags):
                product = torch.mul(g[:, span], source.to(dtype), out=products.resize_(source.shape))
                partial_sums[lag].append(product.sum((0, 1)))
            return grad_block

        if torch.compiler.is_compiling():
            g = grad_y.to(dtype)
            sums = [(g * _earlier(x, history, lag)).sum(3).sum((0, 1)) for lag in range(lags + 1)]
            grad_mix = torch.stack(sums, dim=1)
            grad_x = _mix_terms([_later(grad_y, lag) for lag in range(lags + 1)], weights).to(x.dtype)
        else:
            grad_x = _in_blocks(x, block, dtype)
            grad_mix = torch.stack([torch.stack(sums).sum((0, 2)) for sums in partial_sums], dim=1)
        # Rows of history are read like positions before the first.
        before = torch.arange(-lags, 0, device=x.device)
        newest = _mix_terms([_at(grad_y, before + lag) for lag in range(1, lags + 1)], weights[1:])
        grad_history = torch.nn.functional.pad(newest, (0, 0, 0, 0, history.shape[1] - lags, 0))
        return grad_x, grad_mix.to(mix.dtype), grad_history.to(history.dtype)


def _slices_forward(x: Tensor, mix: Tensor, history: Tensor) -> Tensor:
    weights = _weights(mix, x)
    dtype, lags, rows = weights[0].dtype, len(weights) - 1, history.shape[1]
    if x.shape[1] == 1:  # one token: every lag is a row of history
        past = [history if rows == 1 else history[:, rows - lag : rows - lag + 1] for lag in range(1, lags + 1)]
        y = _mix_terms([x, *past], weights)
        return y if y.dtype == x.dtype else y.to(x.dtype)
    if torch.compiler.is_compiling():
        return _mix_terms([_earlier(x, history, lag) for lag in range(lags + 1)], weights).to(x.dtype)

    def block(start: int, end: int, out: Tensor | None) -> Tensor:
        x_window = x[:, max(0, start - lags) : end].to(dtype)
        y = torch.mul(x_window[:, start - end :], weights[0], out=out)
        for lag, span, source in _spans(x_window, history, start, end, lags):
            if lag:
                y[:, span].addcmul_(source.to(dtype), weights[lag])
        return y

    return _in_blocks(x, block, dtype)


def _spans(x_window: Tensor, history: Tensor, start: int, end: int, lags: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Where the positions start .. end - 1 find their rows: (lag, positions of the block, rows they read).

    Args:
        x_window: the positions max(0, start - lags) .. end - 1.
    """
    before, rows = min(start, lags), history.shape[1]
    for lag in range(lags + 1):
        first = max(start, lag)  # positions before this one read history
        if start < lag:
            stop = min(end, lag)
            yield lag, slice(0, stop - start), history[:, rows - lag + start : rows - lag + stop]
        if first < end:
            offset = before + first - start - lag
            yield lag, slice(first - start, end - start), x_window[:, offset : offset + end - first]


def _earlier(x: Tensor, history: Tensor, lag: int) -> Tensor:
    """x[t - lag], for a compiler to fuse with what is done to it."""
    if lag == 0:
        return x
    t = torch.arange(x.shape[1], device=x.device)
    past = history[:, (t + history.shape[1] - lag).clamp(max=history.shape[1] - 1)]
    return torch.where((t >= lag)[:, None, None], x[:, (t - lag).clamp(min=0)], past)


def _later(x: Tensor, lag: int) -> Tensor:
    """x[t + lag], and zero beyond the end, for a compiler."""
    return x if lag == 0 else _at(x, torch.arange(lag, lag + x.shape[1], device=x.device))


def _at(x: Tensor, t: Tensor) -> Tensor:
    """x[:, t], and zero where there is no such position; no slice, whose bounds a compiler would remember."""
    is_position = (t >= 0) & (t < x.shape[1])
    return torch.where(is_position[:, None, None], x[:, t.clamp(min=0, max=x.shape[1] - 1)], 0)


class _Gather(torch.autograd.Function):
    """Rows of x hold padding or several documents; `sources` and `readers` are those of a `ShiftPlan`."""

    @staticmethod
    def forward(x: Tensor, mix: Tensor, history: Tensor, sources: Tensor, readers: Tensor) -> Tensor:
        return _gather_forward(x, mix, history, sources)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, mix, history, sources, readers = ctx.saved_tensors
        weights = _weights(mix, x)
        dtype = weights[0].dtype
        past = _by_batch(history, x)
        slots = past.shape[1]
        partial_sums = []

        def block(start: int, end: int, out: Tensor | None) -> Tensor:
            real = sources[:, start:end, 0, None, None] >= 0
            g = torch.where(real, grad_y[:, start:end], 0).to(dtype)
            partial_sums.append(
                torch.stack(
                    [(g * _rows(x, past, sources[:, start:end, lag])).sum((0, 1)) for lag in range(len(weights))]
                )
            )
            readers_of_x = readers[:, slots + start : slots + end]
            later = [_pick(grad_y, readers_of_x[:, :, lag]) for lag in range(1, len(weights))]
            return _mix_terms([g, *later], weights, out)

        grad_x = _in_blocks(x, block, dtype)
        grad_mix = torch.stack(partial_sums).sum((0, 3)).t().to(mix.dtype)
        grad_past = _mix_terms([_pick(grad_y, readers[:, :slots, lag]) for lag in range(len(weights))], weights)
        return grad_x, grad_mix, grad_past.to(history.dtype).reshape(history.shape), None, None


def _gather_forward(x: Tensor, mix: Tensor, history: Tensor, sources: Tensor) -> Tensor:
    weights = _weights(mix, x)
    past = _by_batch(history, x)

    def block(start: int, end: int, out: Tensor | None) -> Tensor:
        rows = sources[:, start:end]
        now = torch.where(rows[:, :, 0, None, None] >= 0, x[:, start:end], 0)
        terms = [now, *(_rows(x, past, rows[:, :, lag]) for lag in range(1, len(weights)))]
        return _mix_terms(terms, weights, out)

    return _in_blocks(x, block, weights[0].dtype)


def _by_batch(history: Tensor, x: Tensor) -> Tensor:
    """(S, R, ...) as (B, Q, ...): the sequences of a pack one after another, those of batch rows as they are."""
    return history.reshape(x.shape[0], history.shape[0] // x.shape[0] * history.shape[1], *history.shape[2:])


def _rows(x: Tensor, past: Tensor, index: Tensor) -> Tensor:
    """The rows that a `ShiftPlan` numbers so: (B, n, G, D)."""
    slots = past.shape[1]
    in_past = torch.where(index < slots, index, -1)
    return torch.where(index[..., None, None] >= slots, _pick(x, index - slots), _pick(past, in_past))


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i]], and zero where index is negative; whatever stands in x elsewhere, NaN too, cannot matter."""
    batch = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return torch.where(index[..., None, None] >= 0, x[batch, index.clamp(min=0)], 0)


def _weights(mix_GW: Tensor, x: Tensor) -> list[Tensor]:
    """The coefficients of each lag in the dtype of the arithmetic: W tensors that broadcast against (G, D).

    For long inputs they are spread over D in memory: a multiplication then runs over G * D elements at a stretch.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mix_GW1 = (mix_GW if mix_GW.dtype == dtype else mix_GW.to(dtype)).unsqueeze(2)
    if not torch.compiler.is_compiling() and x.shape[1] > 16:
        mix_GW1 = mix_GW1.expand(-1, -1, x.shape[3]).transpose(0, 1).contiguous().transpose(0, 1)
    return list(mix_GW1.unbind(1))


def _mix_terms(terms: list[Tensor], weights: list[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of terms[j] * weights[j] in the dtype of the weights, in `out` where one is given."""
    total = torch.mul(_cast(terms[0], weights[0]), weights[0], out=out)
    for term, weight in zip(terms[1:], weights[1:], strict=True):
        total.addcmul_(_cast(term, weight), weight)
    return total


def _cast(x: Tensor, like: Tensor) -> Tensor:
    return x if x.dtype == like.dtype else x.to(like.dtype)  # `to` is a call even where it does nothing


def _in_blocks(x: Tensor, block: Callable[[int, int, Tensor | None], Tensor], dtype: torch.dtype) -> Tensor:
    """Fill a tensor like x with what `block(start, end, out)` computes in `dtype`; rounded once to that of x.

    A compiler and a GPU are given the whole at once.
    """
    batch, length, heads, size = x.shape
    # Asked in this order, a compiler makes no assumption about the length.
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return block(0, length, None).to(x.dtype)
    step = max(1, _BLOCK // max(1, batch * heads * size))
    if length <= step:
        return block(0, length, None).to(x.dtype)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for start in range(0, length, step):
        y_block = y[:, start : start + step]
        if x.dtype == dtype:
            block(start, min(start + step, length), y_block)
        else:
            y_block.copy_(block(start, min(start + step, length), None))
    return y
