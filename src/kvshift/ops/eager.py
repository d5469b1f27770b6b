"""The operator in plain PyTorch: any device, any strides, traced without graph breaks.

Shapes: B batch, T positions, S sequences, R rows of state, Q rows of state per batch entry, G KV heads,
D head size, W window, n positions of a block.

Without boundaries a lag is a slice (`_Slices`); with padding or documents it is a gather along a `ShiftPlan`
(`_Gather`). Either works through the positions in blocks that stay in the CPU's cache: one pass over memory
forward, one backward, nothing kept for backward but the inputs, no temporary larger than a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvshift.ops.boundaries import ShiftPlan
from kvshift.ops.plain import by_batch, gradients_of_shift, pick, rows_at
from kvshift.ops.watched import needs_traceable_ops

# Elements of a block: large enough that calls cost little, small enough that its temporaries stay in the cache.
_BLOCK = 2**19


def shift_eager(
    inputs: Sequence[Tensor],
    all_coefficients: Sequence[Tensor | None],
    states: Sequence[Tensor],
    plan: ShiftPlan | None,
) -> list[Tensor]:
    """Mix every token with those before it in its sequence, in each x of the inputs.

        y[t] = coefficients[0] * x[t] + coefficients[1] * x[t-1] + ... + coefficients[W-1] * x[t-W+1]

    Args:
        inputs: (B, T, G, D) each.
        all_coefficients: (G, W) each; None returns x as it is.
        states: (S, R, G, D) each, the rows before each sequence, R >= W - 1.
        plan: who reads whom; None where every row of x is one piece of one sequence, without padding.

    Returns:
        y like x, for each.
    """
    each = zip(inputs, all_coefficients, states, strict=True)
    return [x if coefficients is None else _shift(x, coefficients, state, plan) for x, coefficients, state in each]


def _shift(x: Tensor, coefficients: Tensor, state: Tensor, plan: ShiftPlan | None) -> Tensor:
    if x.shape[0] * x.shape[1] == 0:  # no token to look up or to sum over
        return _cast(_weighted_sum([x], _lags(coefficients, x)[:1]), x)
    return _shift_slices(x, coefficients, state) if plan is None else _shift_gathered(x, coefficients, state, plan)


def _tracked(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def _shift_slices(x: Tensor, coefficients: Tensor, state: Tensor) -> Tensor:
    forward = _Slices.apply if _tracked(x, coefficients, state) else _slices_forward
    return forward(x, coefficients, state)


def _shift_gathered(x: Tensor, coefficients: Tensor, state: Tensor, plan: ShiftPlan) -> Tensor:
    if _tracked(x, coefficients, state):
        return _Gather.apply(x, coefficients, state, plan.sources, plan.readers)
    return _gather_forward(x, coefficients, state, plan.sources)


class _Slices(torch.autograd.Function):
    """Every row of x is one piece of one sequence, and state the rows before it."""

    @staticmethod
    def forward(x: Tensor, coefficients: Tensor, state: Tensor) -> Tensor:
        return _slices_forward(x, coefficients, state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, coefficients, state = ctx.saved_tensors
        if needs_traceable_ops(grad_y):
            return gradients_of_shift(x, coefficients, state, None, grad_y)
        now, *earlier = _lags(coefficients, x)
        dtype, lags = now.weight.dtype, len(earlier)
        partial_sums: list[list[Tensor]] = [[] for _ in (now, *earlier)]  # by lag: (G, D) of each span
        products = torch.empty(0, dtype=dtype, device=x.device)  # one buffer for all blocks: new pages cost more

        def block(start: int, end: int, out: Tensor | None) -> Tensor:
            g = grad_y[:, start : end + lags].to(dtype)  # the last block has nothing to look ahead to
            x_window = x[:, max(0, start - lags) : end].to(dtype)
            grad_block = now.times(g[:, : end - start], out)
            for j, lag in enumerate(earlier, 1):
                later = g[:, j : j + end - start]
                lag.add_to(grad_block[:, : later.shape[1]], later)
            for lag, span, source in _spans(x_window, state, start, end, lags):
                product = torch.mul(g[:, span], source.to(dtype), out=products.resize_(source.shape))
                partial_sums[lag].append(product.sum((0, 1)))
            return grad_block

        if torch.compiler.is_compiling():
            g = grad_y.to(dtype)
            sums = [(g * _earlier(x, state, lag)).sum(3).sum((0, 1)) for lag in range(lags + 1)]
            grad_coefficients = torch.stack(sums, dim=1)
            grad_x = _weighted_sum([_later(grad_y, lag) for lag in range(lags + 1)], [now, *earlier])
            grad_x = _cast(grad_x, x)
        else:
            grad_x = _in_blocks(x, block, dtype)
            grad_coefficients = torch.stack([torch.stack(sums).sum((0, 2)) for sums in partial_sums], dim=1)
        # Rows of state are read like positions before the first.
        before = torch.arange(-lags, 0, device=x.device)
        newest = _weighted_sum([_at(grad_y, before + lag) for lag in range(1, lags + 1)], earlier)
        grad_state = torch.nn.functional.pad(newest, (0, 0, 0, 0, state.shape[1] - lags, 0))
        return grad_x, grad_coefficients.to(coefficients.dtype), grad_state.to(state.dtype)


def _slices_forward(x: Tensor, coefficients: Tensor, state: Tensor) -> Tensor:
    now, *earlier = _lags(coefficients, x)
    dtype, lags = now.weight.dtype, len(earlier)
    if x.shape[1] == 1:  # every lag is a row of state
        rows = state.shape[1]
        before = [state[:, rows - lag : rows - lag + 1] for lag in range(1, lags + 1)]
        return _cast(_weighted_sum([x, *before], [now, *earlier]), x)
    if torch.compiler.is_compiling():
        return _cast(_weighted_sum([_earlier(x, state, lag) for lag in range(lags + 1)], [now, *earlier]), x)

    def block(start: int, end: int, out: Tensor | None) -> Tensor:
        x_window = x[:, max(0, start - lags) : end].to(dtype)
        y = now.times(x_window[:, start - end :], out)
        for lag, span, source in _spans(x_window, state, start, end, lags):
            if lag:
                earlier[lag - 1].add_to(y[:, span], source)
        return y

    return _in_blocks(x, block, dtype)


def _spans(x_window: Tensor, state: Tensor, start: int, end: int, lags: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Where the positions start .. end - 1 find their rows: (lag, positions of the block, rows they read).

    Args:
        x_window: the positions max(0, start - lags) .. end - 1.
    """
    before, rows = min(start, lags), state.shape[1]
    for lag in range(lags + 1):
        first = max(start, lag)  # positions before this one read state
        if start < lag:
            stop = min(end, lag)
            yield lag, slice(0, stop - start), state[:, rows - lag + start : rows - lag + stop]
        if first < end:
            offset = before + first - start - lag
            yield lag, slice(first - start, end - start), x_window[:, offset : offset + end - first]


def _earlier(x: Tensor, state: Tensor, lag: int) -> Tensor:
    """x[t - lag], for a compiler to fuse with what is done to it."""
    if lag == 0:
        return x
    t = torch.arange(x.shape[1], device=x.device)
    before = state[:, (t + state.shape[1] - lag).clamp(max=state.shape[1] - 1)]
    return torch.where((t >= lag)[:, None, None], x[:, (t - lag).clamp(min=0)], before)


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
    def forward(x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor, readers: Tensor) -> Tensor:
        return _gather_forward(x, coefficients, state, sources)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, coefficients, state, sources, readers = ctx.saved_tensors
        if needs_traceable_ops(grad_y):
            return *gradients_of_shift(x, coefficients, state, sources, grad_y), None, None
        lags = _lags(coefficients, x)
        dtype = lags[0].weight.dtype
        state_BQGD = by_batch(state, x)
        slots = state_BQGD.shape[1]
        partial_sums = []

        def block(start: int, end: int, out: Tensor | None) -> Tensor:
            real = sources[:, start:end, 0, None, None] >= 0
            g = torch.where(real, grad_y[:, start:end], 0).to(dtype)
            partial_sums.append(
                torch.stack(
                    [(g * rows_at(x, state_BQGD, sources[:, start:end, lag])).sum((0, 1)) for lag in range(len(lags))]
                )
            )
            readers_of_x = readers[:, slots + start : slots + end]
            later = [pick(grad_y, readers_of_x[:, :, lag]) for lag in range(1, len(lags))]
            return _weighted_sum([g, *later], lags, out)

        grad_x = _in_blocks(x, block, dtype)
        grad_coefficients = torch.stack(partial_sums).sum((0, 3)).t().to(coefficients.dtype)
        grad_state = _weighted_sum([pick(grad_y, readers[:, :slots, lag]) for lag in range(len(lags))], lags)
        return grad_x, grad_coefficients, grad_state.to(state.dtype).reshape(state.shape), None, None


def _gather_forward(x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor) -> Tensor:
    lags = _lags(coefficients, x)
    state_BQGD = by_batch(state, x)

    def block(start: int, end: int, out: Tensor | None) -> Tensor:
        rows = sources[:, start:end]
        now = torch.where(rows[:, :, 0, None, None] >= 0, x[:, start:end], 0)
        terms = [now, *(rows_at(x, state_BQGD, rows[:, :, lag]) for lag in range(1, len(lags)))]
        return _weighted_sum(terms, lags, out)

    return _in_blocks(x, block, lags[0].weight.dtype)


class _Lag(NamedTuple):
    """The coefficients of one lag; a head whose coefficient is zero reads nothing there: no infinity becomes NaN."""

    weight: Tensor
    """In the dtype of the arithmetic; broadcasts against (G, D)."""
    zero: Tensor | None
    """(G, 1), the heads where it is zero; None if there are none."""

    def times(self, term: Tensor, out: Tensor | None = None) -> Tensor:
        """weight * term, in `out` where one is given."""
        product = torch.mul(_cast(term, self.weight), self.weight, out=out)
        return product if self.zero is None else product.masked_fill_(self.zero, 0)

    def add_to(self, total: Tensor, term: Tensor) -> None:
        """total += weight * term, rounded once."""
        term = _cast(term, self.weight)
        if self.zero is None:
            total.addcmul_(term, self.weight)
        else:
            total.copy_(torch.where(self.zero, total, torch.addcmul(total, term, self.weight)))


def _lags(coefficients_GW: Tensor, x: Tensor) -> list[_Lag]:
    """All W of them. On a CPU one may look whether any coefficient is zero; elsewhere that would wait for the device.

    For long inputs weights are spread over D in memory: a multiplication then runs over G * D elements at a stretch.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    coefficients_GW1 = (coefficients_GW if coefficients_GW.dtype == dtype else coefficients_GW.to(dtype)).unsqueeze(2)
    zero_GW1 = coefficients_GW1 == 0
    eager_on_cpu = x.is_cpu and not torch.compiler.is_compiling()
    zeros = [None] * coefficients_GW.shape[1] if eager_on_cpu and not zero_GW1.any() else zero_GW1.unbind(1)
    if not torch.compiler.is_compiling() and x.shape[1] > 16:
        coefficients_GW1 = coefficients_GW1.expand(-1, -1, x.shape[3]).transpose(0, 1).contiguous().transpose(0, 1)
    return [_Lag(weight, zero) for weight, zero in zip(coefficients_GW1.unbind(1), zeros, strict=True)]


def _weighted_sum(terms: list[Tensor], lags: list[_Lag], out: Tensor | None = None) -> Tensor:
    """The sum of the terms times their weights in the dtype of the weights, in `out` where one is given."""
    if torch.compiler.is_compiling():
        # Nothing in place, and no `to` that does nothing: torch.compile of 2.11 gets the gradients of an autograd
        # function wrong whose output is a tensor that its forward had before.
        weight, zero = lags[0]
        total = (_cast(terms[0], weight) * weight).masked_fill(zero, 0)  # type: ignore[arg-type]  # never None here
        for term, (weight, zero) in zip(terms[1:], lags[1:], strict=True):
            total = torch.where(zero, total, torch.addcmul(total, _cast(term, weight), weight))  # type: ignore[arg-type]
        return total
    total = lags[0].times(terms[0], out)
    for term, lag in zip(terms[1:], lags[1:], strict=True):
        lag.add_to(total, term)
    return total


def _cast(x: Tensor, like: Tensor) -> Tensor:
    # `to` is a call even where it does nothing; what it matters for in 2.11, `_weighted_sum` says.
    return x if x.dtype == like.dtype else x.to(like.dtype)


def _in_blocks(x: Tensor, block: Callable[[int, int, Tensor | None], Tensor], dtype: torch.dtype) -> Tensor:
    """Fill a tensor like x with what `block(start, end, out)` computes in `dtype`; rounded once to that of x.

    A compiler and a GPU are given the whole at once.
    """
    batch, length, heads, size = x.shape
    # Asked in this order, a compiler makes no assumption about the length.
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return _cast(block(0, length, None), x)
    step = max(1, _BLOCK // max(1, batch * heads * size))
    if length <= step:
        return _cast(block(0, length, None), x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for start in range(0, length, step):
        y_block = y[:, start : start + step]
        if x.dtype == dtype:
            block(start, min(start + step, length), y_block)
        else:
            y_block.copy_(block(start, min(start + step, length), None))
    return y
