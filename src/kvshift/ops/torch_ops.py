"""The operator in PyTorch operations, on any device and with any strides, in two forms with the same bits.

`shift_eager` works through the positions in blocks that stay in the CPU's cache, by an autograd function: one pass over
memory forward, one backward, nothing kept for backward but the inputs, no temporary larger than a block. A compiler
and a GPU are given the whole as one block.

`shift_traceable` has no autograd function, no operation in place and no branch on data: tracers record it, `torch.func`
transforms it, forward-mode AD differentiates it. It is slower and keeps more for backward.

Without boundaries a lag is a slice; with padding or documents it is a gather along a `ShiftPlan`.

Shapes: B batch, T positions, S sequences, R rows of state, Q rows of state per batch entry, H query heads, G KV heads,
D head size, W window, n positions of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C import _TorchDispatchModeKey
from torch.autograd import forward_ad

from kvshift.ops.arguments import Call, compute_dtype
from kvshift.ops.boundaries import ShiftPlan, plan_without_boundaries, readers_without_boundaries
from kvshift.ops.rope import rotate

Shift = Callable[[Tensor, Tensor, Tensor, "ShiftPlan | None"], Tensor]
"""Mixes every token of x with those before it in its sequence.

    y[t] = coefficients[0] * x[t] + coefficients[1] * x[t-1] + ... + coefficients[W-1] * x[t-W+1]

Arguments: x (B, T, G, D); coefficients (G, W); state (S, R, G, D), the rows before each sequence, R >= W - 1; the plan,
None where every row of x is one piece of one sequence, without padding. Returns y like x.
"""

# Elements of a block: large enough that calls cost little, small enough that its temporaries stay in the cache.
_BLOCK = 2**19

PLAIN: tuple[type, ...] = (Tensor, torch.nn.Parameter)
_TRACERS = (_TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL)
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_BATCHED = torch._C._parse_dispatch_key("Batched")  # what `is_grads_batched` hands to backward


# Which of the two forms -----------------------------------------------------------------------------------------------


def needs_traceable_ops(*gradients: Tensor, by_compiler: bool = False) -> bool:
    """Whether this call is recorded or transformed operation by operation.

    By transforms of `torch.func`, tracers (`make_fx`, fake tensors, `torch.jit.trace`) and forward-mode AD: they would
    miss what a kernel writes or an autograd function computes. Modes that only count memory or operations are shown
    what runs otherwise. torch.compile and torch.export trace in ways of their own; only a transform within them counts.

    Args:
        by_compiler: whether those two count as well.
        gradients: in backward, those that came in. Then also counts whether backward is differentiated
            (`create_graph=True`), and whether gradients come in batches (`is_grads_batched=True`).
    """
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():
        return by_compiler
    return (
        (torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACERS)))
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or (len(gradients) > 0 and (torch.is_grad_enabled() or any(map(_is_batched, gradients))))
    )


def is_exporting() -> bool:
    """Whether torch.export traces. (`torch.compiler.is_exporting` says so of torch.compile too in 2.10 and 2.11.)"""
    return torch.compiler._is_exporting_flag


def _is_batched(gradient: Tensor) -> bool:
    return torch._C._dispatch_keys(gradient).has(cast(Any, _BATCHED))


# The traceable form ---------------------------------------------------------------------------------------------------


def shift_traceable(x: Tensor, coefficients: Tensor, state: Tensor, plan: ShiftPlan | None) -> Tensor:
    """See `Shift`."""
    return weighted_sum(x, coefficients, state, None if plan is None else plan.sources).to(x.dtype)


def weighted_sum(x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None) -> Tensor:
    """The sum of the lags, in the dtype of the arithmetic; `sources` as in a `ShiftPlan`, None without boundaries."""
    batch, length = x.shape[:2]
    dtype = compute_dtype(x)
    weights = coefficients.to(dtype).unsqueeze(2).unbind(1)
    if batch * length == 0:  # no token to look up
        return x.to(dtype) * weights[0]
    rows = torch.cat([by_batch(state, x), x], dim=1).to(dtype)
    slots = rows.shape[1] - length
    total = None
    for lag, weight in enumerate(weights):
        span = slice(slots - lag, slots - lag + length)
        term = rows[:, span] if sources is None else pick(rows, sources[:, :, lag] + slots)
        total = _traceable_add(total, term, weight)
    return cast(Tensor, total)


def _traceable_add(total: Tensor | None, term: Tensor, weight: Tensor) -> Tensor:
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


def shift_norm_rope_traceable(x: Call) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Shift, QK-norm and rotation, as `kvshift.ops.triton.launch.shift` does them."""

    def shifted(y: Tensor, coefficients: Tensor | None, state: Tensor | None) -> Tensor:
        if coefficients is None:
            return y.to(compute_dtype(y))
        if state is None:
            state = y.new_zeros(y.shape[0], coefficients.shape[1] - 1, *y.shape[2:])
        return weighted_sum(y, coefficients, state, x.sources)

    def finished(y: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            y = y * (y.square().mean(-1, keepdim=True) + (x.eps or 0.0)).rsqrt() * scale.to(y.dtype)
        if x.cos is None or x.sin is None:
            return y
        return rotate(y, (x.cos.to(y.dtype).unsqueeze(2), x.sin.to(y.dtype).unsqueeze(2)))

    q = None if x.q is None else finished(shifted(x.q, None, None), x.q_scale).to(x.q.dtype)
    k = finished(shifted(x.k, x.alpha, x.k_state), x.k_scale).to(x.k.dtype)
    return q, k, None if x.v is None else shifted(x.v, x.beta, x.v_state).to(x.v.dtype)


def gradients_of_shift(
    x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, coefficients and state, in a backward pass that is differentiated or traced."""

    def forward(x: Tensor, coefficients: Tensor, state: Tensor) -> Tensor:
        return weighted_sum(x, coefficients, state, sources).to(x.dtype)

    return cast(Any, tuple(gradients(forward, (x, coefficients, state), grad_y)))


def gradients_of_state(
    grad_y: Tensor, coefficients: Tensor, state: Tensor, readers: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of the state, and its rows' share of those of the coefficients.

    Args:
        readers: as in a `ShiftPlan`.
    """
    if grad_y.shape[0] * grad_y.shape[1] == 0:  # no token that reads any
        return torch.zeros_like(state), torch.zeros_like(coefficients)
    state_BQGD, dtype = by_batch(state, grad_y), coefficients.dtype
    slots, lags = state_BQGD.shape[1], range(coefficients.shape[1])
    if readers is None:
        readers = readers_without_boundaries(-slots, 0, grad_y.shape[1], len(lags), state.device)
    read = [pick(grad_y, readers[:, :slots, lag]).to(dtype) for lag in lags]
    weights = coefficients.unsqueeze(2).unbind(1)
    grad_state = torch.stack([torch.where(w == 0, 0, g * w) for g, w in zip(read, weights, strict=True)]).sum(0)
    is_read = readers[:, :slots].amax(2)[..., None, None] >= 0  # others may hold anything
    share = torch.stack([(g * torch.where(is_read, state_BQGD, 0)).sum((0, 1, 3)) for g in read], dim=1)
    return grad_state.to(state.dtype).reshape(state.shape), share


def gradients(function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Any) -> list[Tensor | None]:
    """Of `function` at its inputs, from those of its results; None for those that are None."""

    def of_tensors(*tensors: Tensor) -> Any:
        left = iter(tensors)
        return function(*(None if x is None else next(left) for x in inputs))

    pull = cast(Any, torch.func.vjp(of_tensors, *(x for x in inputs if x is not None)))[1]
    pulled = iter(pull(grads))
    return [None if x is None else next(pulled) for x in inputs]


# Rows -----------------------------------------------------------------------------------------------------------------


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
    """The rows that a `ShiftPlan` names so: (B, n, G, D)."""
    in_state = torch.where(index < 0, index.long() + state_BQGD.shape[1], -1)
    return torch.where(index[..., None, None] >= 0, pick(x, index), pick(state_BQGD, in_state))


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i]], and zero where index is negative; whatever stands in x elsewhere, NaN too, cannot matter."""
    batch = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return torch.where(index[..., None, None] >= 0, x[batch, index.long().clamp(min=0)], 0)  # ONNX: 64 bits


# The blocked form -----------------------------------------------------------------------------------------------------


def differentiable(
    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> Shift:
    """A `Shift` whose gradients autograd does not derive.

    Args:
        forward: y, of x, coefficients, state and the sources of the plan, or None.
        backward: the gradients of x, coefficients and state; of that of y, those four, and the readers of the plan.
    """

    class Function(torch.autograd.Function):
        # With a `setup_context` PyTorch would inspect the signature in every call: longer than a small tensor takes.
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None, readers: Tensor | None
        ) -> Tensor:
            ctx.save_for_backward(x, coefficients, state, sources, readers)
            return forward(x, coefficients, state, sources)

        @staticmethod
        def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
            x, coefficients, state, sources, readers = ctx.saved_tensors
            if needs_traceable_ops(grad_y):
                return *gradients_of_shift(x, coefficients, state, sources, grad_y), None, None
            return *backward(grad_y, x, coefficients, state, sources, readers), None, None

    def shift(x: Tensor, coefficients: Tensor, state: Tensor, plan: ShiftPlan | None) -> Tensor:
        sources, readers = (None, None) if plan is None else (plan.sources, plan.readers)
        if torch.is_grad_enabled() and (x.requires_grad or coefficients.requires_grad or state.requires_grad):
            return cast(Tensor, Function.apply(x, coefficients, state, sources, readers))
        return forward(x, coefficients, state, sources)

    return shift


def shift_eager(x: Tensor, coefficients: Tensor, state: Tensor, plan: ShiftPlan | None) -> Tensor:
    """See `Shift`."""
    if x.shape[0] * x.shape[1] == 0:  # no token to look up or to sum over
        return _cast(_weighted_sum([(0, _ALL, x)], _lags(coefficients, x)), x)
    if plan is None and torch.compiler.is_compiling():  # which computes the row numbers where it reads the rows
        plan = plan_without_boundaries(x.shape[1], coefficients.shape[1], state.shape[1], x.device)
    return _shift_in_blocks(x, coefficients, state, plan)


def _forward(x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None) -> Tensor:
    lags = _lags(coefficients, x)

    def block(start: int, end: int, out: Tensor | None) -> Tensor:
        return _weighted_sum(_rows_read(x, state, sources, start, end, lags), lags, out)

    return _in_blocks(x, block, lags[0].weight.dtype)


def _backward(
    grad_y: Tensor, x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None, readers: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    lags, slots = _lags(coefficients, x), by_batch(state, x).shape[1]
    dtype = lags[0].weight.dtype
    partial_sums: list[list[Tensor]] = [[] for _ in lags]  # (G, D), of each block
    products = torch.empty(0, dtype=dtype, device=x.device)  # one buffer for all blocks: new pages cost more

    def block(start: int, end: int, out: Tensor | None) -> Tensor:
        gradients = list(_gradients_read(grad_y, sources, readers, slots, start, end, lags))
        g = gradients[0][2]
        for lag, span, rows in _rows_read(x, state, sources, start, end, lags):
            if sources is None:
                product = torch.mul(g[:, span], _cast(rows, g), out=products.resize_(rows.shape))
            else:
                product = g * rows
            if torch.compiler.is_compiling():  # a sum that it fuses with the gradient of x, which reads the same rows
                product = product.sum(3, keepdim=True)
            partial_sums[lag].append(product.sum((0, 1)))
        return _weighted_sum(gradients, lags, out)

    grad_x = _in_blocks(x, block, dtype)
    grad_coefficients = torch.stack([torch.stack(sums).sum((0, 2)) for sums in partial_sums], dim=1)
    # Rows of state are read like positions before the first, by no lag of 0; without boundaries the newest alone.
    if readers is None:
        readers = readers_without_boundaries(1 - len(lags), 0, x.shape[1], len(lags), x.device)
    by_lag = readers[:, :slots].unbind(2)
    newest = _weighted_sum([(lag, _ALL, pick(grad_y, by_lag[lag])) for lag in range(1, len(lags))], lags)
    grad_state = torch.nn.functional.pad(newest, (0, 0, 0, 0, slots - newest.shape[1], 0))
    return grad_x, grad_coefficients.to(coefficients.dtype), grad_state.to(state.dtype).reshape(state.shape)


_shift_in_blocks = differentiable(_forward, _backward)

_ALL = slice(None)
Terms = Iterable[tuple[int, slice, Tensor]]
"""Of a weighted sum: the lag, the positions of the block to which it adds something, and what its weight multiplies."""


def _rows_read(x: Tensor, state: Tensor, sources: Tensor | None, start: int, end: int, lags: list[_Lag]) -> Terms:
    """The rows that the positions start .. end - 1 read. First comes lag 0, of all of them."""
    if sources is not None:
        state_BQGD, of_block = by_batch(state, x), sources[:, start:end]
        yield 0, _ALL, torch.where(of_block[:, :, 0, None, None] >= 0, x[:, start:end], 0)
        for lag in range(1, len(lags)):
            yield lag, _ALL, rows_at(x, state_BQGD, of_block[:, :, lag])
        return
    first = max(0, start - len(lags) + 1)
    window, rows = _cast(x[:, first:end], lags[0].weight), state.shape[1]
    for lag in range(len(lags)):
        own = max(start, lag)  # positions before this one read state
        if start < lag:
            stop = min(end, lag)
            yield lag, slice(0, stop - start), state[:, rows - lag + start : rows - lag + stop]
        if own < end:
            yield lag, slice(own - start, end - start), window[:, own - lag - first : end - lag - first]


def _gradients_read(
    grad_y: Tensor,
    sources: Tensor | None,
    readers: Tensor | None,
    slots: int,
    start: int,
    end: int,
    lags: list[_Lag],
) -> Terms:
    """The gradients of the positions that read the rows start .. end - 1. First comes lag 0, of all of them."""
    if sources is not None and readers is not None:
        real = sources[:, start:end, 0, None, None] >= 0
        yield 0, _ALL, _cast(torch.where(real, grad_y[:, start:end], 0), lags[0].weight)
        for lag in range(1, len(lags)):
            yield lag, _ALL, pick(grad_y, readers[:, slots + start : slots + end, lag])
        return
    window = _cast(grad_y[:, start : end + len(lags) - 1], lags[0].weight)  # behind the last position is nothing
    for lag in range(len(lags)):
        later = window[:, lag : lag + end - start]
        yield lag, slice(0, later.shape[1]), later


class _Lag(NamedTuple):
    """The coefficients of one lag; a head whose coefficient is zero reads nothing there: no infinity becomes NaN."""

    weight: Tensor
    """In the dtype of the arithmetic; broadcasts against (G, D)."""
    zero: Tensor | None
    """(G, 1), the heads where it is zero; None if there are none."""


def _lags(coefficients_GW: Tensor, x: Tensor) -> list[_Lag]:
    """All W of them. On a CPU one may look whether any coefficient is zero; elsewhere that would wait for the device.

    For long inputs weights are spread over D in memory: a multiplication then runs over G * D elements at a stretch.
    """
    dtype = compute_dtype(x)
    coefficients_GW1 = (coefficients_GW if coefficients_GW.dtype == dtype else coefficients_GW.to(dtype)).unsqueeze(2)
    zero_GW1 = coefficients_GW1 == 0
    eager_on_cpu = x.is_cpu and not torch.compiler.is_compiling()
    zeros = [None] * coefficients_GW.shape[1] if eager_on_cpu and not zero_GW1.any() else zero_GW1.unbind(1)
    if not torch.compiler.is_compiling() and x.shape[1] > 16:
        coefficients_GW1 = coefficients_GW1.expand(-1, -1, x.shape[3]).transpose(0, 1).contiguous().transpose(0, 1)
    return [_Lag(weight, zero) for weight, zero in zip(coefficients_GW1.unbind(1), zeros, strict=True)]


def _weighted_sum(terms: Terms, lags: list[_Lag], out: Tensor | None = None) -> Tensor:
    """The sum of the terms times their weights in the dtype of the weights, in `out` where one is given."""
    compiling, total = torch.compiler.is_compiling(), None
    for lag, span, rows in terms:
        weight, zero = lags[lag]
        term = _cast(rows, weight)
        if total is None:
            total = torch.mul(term, weight, out=out)
            if zero is not None:
                total = total.masked_fill(zero, 0) if compiling else total.masked_fill_(zero, 0)
        elif compiling:
            # Nothing in place, and no `to` that does nothing: torch.compile of 2.11 gets the gradients of an autograd
            # function wrong whose output is a tensor that its forward had before.
            total = torch.where(cast(Tensor, zero), total, torch.addcmul(total, term, weight))
        elif zero is None:
            total[:, span].addcmul_(term, weight)
        else:
            part = total[:, span]
            part.copy_(torch.where(zero, part, torch.addcmul(part, term, weight)))
    return cast(Tensor, total)


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
