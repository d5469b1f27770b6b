"""The operator in PyTorch operations, on any device and with any strides, in two forms with the same bits.

`shift_eager` is an autograd function that processes the positions in blocks that stay in the CPU's cache. It makes one
pass over memory forward and one backward, saves only the inputs, and needs no temporary larger than a block. Compilers
and GPUs get the whole input as one block.

`shift_traceable` has no autograd function, no in-place operation and no branch on data, so that tracers can record it,
`torch.func` can transform it, forward-mode AD can differentiate it, and it takes tensor subclasses of any kind. It is
slower and saves more for backward.

Without boundaries, a lag is a slice. With padding or documents, it is a gather along a `ShiftPlan`.

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
from kvshift.ops.memory import forbids_in_place
from kvshift.ops.rope import rotate

Shift = Callable[[Tensor, Tensor, Tensor, "ShiftPlan | None"], Tensor]
"""A function that mixes every token of x with the preceding tokens of its sequence.

    y[t] = coefficients[0] * x[t] + coefficients[1] * x[t-1] + ... + coefficients[W-1] * x[t-W+1]

Arguments: x (B, T, G, D); coefficients (G, W); state (S, R, G, D), the rows before each sequence, R >= W - 1; the plan,
or None if every row of x is one piece of one sequence, without padding. Returns y, of the shape and dtype of x.
"""

# Elements per block: large enough that calls cost little, small enough that temporaries stay in the cache.
_BLOCK = 2**19

_TRACERS = (_TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL)
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_BATCHED = torch._C._parse_dispatch_key("Batched")  # of the gradients that `is_grads_batched` passes to backward


# Which of the two forms -----------------------------------------------------------------------------------------------


def needs_traceable_ops(*gradients: Tensor | None, by_compiler: bool = False) -> bool:
    """Return True if the operations of this call are recorded or transformed one by one.

    This is the case under transforms of `torch.func`, tracers (`make_fx`, fake tensors, `torch.jit.trace`) and
    forward-mode AD, which would miss the work of a kernel or an autograd function. It is not the case under modes that
    only count memory or operations, nor under torch.compile and torch.export, unless a transform is active within them.

    Args:
        by_compiler: whether torch.compile and torch.export count as well.
        gradients: the incoming gradients, in backward. Given these, the result is also True if backward is
            differentiated (`create_graph=True`), or if gradients are batched (`is_grads_batched=True`) or
            `forbids_in_place`.
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
        or (len(gradients) > 0 and (torch.is_grad_enabled() or any(map(_is_transformed, gradients))))
    )


def is_exporting() -> bool:
    """Return True under torch.export. (In 2.10 and 2.11, `torch.compiler.is_exporting` includes torch.compile.)"""
    return torch.compiler._is_exporting_flag


def _is_transformed(gradient: Tensor | None) -> bool:
    return gradient is not None and (
        torch._C._dispatch_keys(gradient).has(cast(Any, _BATCHED)) or forbids_in_place(gradient)
    )


# The traceable form ---------------------------------------------------------------------------------------------------


def shift_traceable(x: Tensor, coefficients: Tensor, state: Tensor, plan: ShiftPlan | None) -> Tensor:
    """See `Shift`."""
    return weighted_sum(x, coefficients, state, None if plan is None else plan.sources).to(x.dtype)


def weighted_sum(x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None) -> Tensor:
    """Sum the lags in the dtype of the arithmetic; `sources` as in a `ShiftPlan`, None without boundaries."""
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
        term = rows[:, span] if sources is None else gather_rows(rows, sources[:, :, lag] + slots)
        total = _traceable_add(total, term, weight)
    return cast(Tensor, total)


def _traceable_add(total: Tensor | None, term: Tensor, weight: Tensor) -> Tensor:
    """Return total + weight * term; where weight is zero, exactly total, whatever the term.

    The derivative with respect to a zero weight is still the term. A plain `where` would cut it, and an infinity in the
    branch that is not taken would make it NaN.
    """
    zero = weight == 0
    term = torch.where(zero & ~term.isfinite(), 0, term)
    product = weight * term
    nothing = product.detach() - product  # zero, with the derivative
    if total is None:
        return torch.where(zero, 0 - nothing, product)
    return torch.where(zero, total - nothing, torch.addcmul(total, term, weight))


def shift_norm_rope_traceable(x: Call) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Shift, normalise and rotate q, k and v, as `kvshift.ops.triton.launch.shift` does."""

    def shifted(y: Tensor, coefficients: Tensor | None, state: Tensor | None) -> Tensor:
        if coefficients is None:
            return y.to(compute_dtype(y))
        return weighted_sum(y, coefficients, x.state_or_zeros(y, state), x.sources)

    def finished(y: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            y = y * (y.square().mean(-1, keepdim=True) + (x.eps or 0.0)).rsqrt() * scale.to(y.dtype)
        if x.cos is None or x.sin is None:
            return y
        return rotate(y, (x.cos.to(y.dtype).unsqueeze(2), x.sin.to(y.dtype).unsqueeze(2)))

    q = None if x.q is None else finished(shifted(x.q, None, None), x.q_scale).to(x.q.dtype)
    k = finished(shifted(x.k, x.alpha, x.k_state), x.k_scale).to(x.k.dtype)
    return q, k, None if x.v is None else shifted(x.v, x.beta, x.v_state).to(x.v.dtype)


def gradients_of_state(
    grad_y: Tensor, coefficients: Tensor, state: Tensor, readers: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the state, and the contribution of its rows to the gradient of the coefficients.

    Args:
        readers: as in a `ShiftPlan`; None without boundaries.
    """
    if grad_y.shape[0] * grad_y.shape[1] == 0:  # no token reads the state
        return torch.zeros_like(state), torch.zeros_like(coefficients)
    state_BQGD, dtype = by_batch(state, grad_y), coefficients.dtype
    slots, lags = state_BQGD.shape[1], range(coefficients.shape[1])
    if readers is None:
        readers = readers_without_boundaries(-slots, 0, grad_y.shape[1], len(lags), state.device)
    read = [gather_rows(grad_y, readers[:, :slots, lag]).to(dtype) for lag in lags]
    weights = coefficients.unsqueeze(2).unbind(1)
    grad_state = torch.stack([torch.where(w == 0, 0, g * w) for g, w in zip(read, weights, strict=True)]).sum(0)
    is_read = readers[:, :slots].amax(2)[..., None, None] >= 0  # other rows may contain anything
    share = torch.stack([(g * torch.where(is_read, state_BQGD, 0)).sum((0, 1, 3)) for g in read], dim=1)
    return grad_state.to(state.dtype).reshape(state.shape), share


def gradients(function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Any) -> list[Tensor | None]:
    """Return the gradients of the inputs of `function`, given those of its results; None for inputs that are None."""

    def of_tensors(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        return function(*(None if x is None else next(remaining) for x in inputs))

    pull = cast(Any, torch.func.vjp(of_tensors, *(x for x in inputs if x is not None)))[1]
    pulled = iter(pull(grads))
    return [None if x is None else next(pulled) for x in inputs]


# Rows -----------------------------------------------------------------------------------------------------------------


def state_after(x: Tensor, state: Tensor, plan: ShiftPlan | None, max_rows: int) -> Tensor:
    """Return a copy of the last rows of each sequence, state included.

    Args:
        x, state, plan: as in `shift_eager`.
        max_rows: maximum number of rows to return; with a plan, R rows are returned.
    """
    if plan is None:
        return _newest(x, state, max_rows)
    if x.shape[0] * x.shape[1] == 0:
        return state.clone()
    return rows_at(x, by_batch(state, x), plan.next_state).reshape(state.shape)


def _newest(x: Tensor, state: Tensor, rows: int) -> Tensor:
    """Return a copy of the last rows of state and x together.

    A view would keep all of x alive, and would change if the caller wrote the next token into the same x.
    """
    length, held = x.shape[1], state.shape[1]
    if torch.compiler.is_compiling() and held == rows:  # one program for any number of new rows
        t = torch.arange(length - rows, length, device=x.device)
        before = state[:, (t + held).clamp(max=held - 1)]
        return torch.where((t >= 0)[:, None, None], x[:, t.clamp(min=0)], before)
    if length < rows:
        return torch.cat([state, x], dim=1)[:, -rows:]
    return x[:, length - rows :].clone()


def by_batch(state: Tensor, x: Tensor) -> Tensor:
    """Reshape state (S, R, ...) to (B, Q, ...), with the sequences of a pack one after another."""
    return state.reshape(x.shape[0], state.shape[0] // x.shape[0] * state.shape[1], *state.shape[2:])


def rows_at(x: Tensor, state_BQGD: Tensor, index: Tensor) -> Tensor:
    """Return the rows of x or of the state that `index`, from a `ShiftPlan`, refers to: (B, n, G, D)."""
    slots, index = state_BQGD.shape[1], index.long()  # ONNX needs 64 bits
    batch, row = torch.arange(x.shape[0], device=x.device).unsqueeze(1), index[..., None, None]
    from_state = torch.where(row >= -slots, state_BQGD[batch, (index + slots).clamp(0, slots - 1)], 0)
    return torch.where(row >= 0, x[batch, index.clamp(min=0)], from_state)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[b, index[b, i]], or zero where index is negative. Rows that are not read, even NaN, have no effect."""
    batch = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return torch.where(index[..., None, None] >= 0, x[batch, index.long().clamp(min=0)], 0)  # ONNX needs 64 bits


# The blocked form -----------------------------------------------------------------------------------------------------


def make_differentiable(
    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> Shift:
    """Make a `Shift` from a forward and a backward function.

    Args:
        forward: computes y from x, coefficients, state and the sources of the plan (or None).
        backward: computes the gradients of x, coefficients and state from the gradient of y, the arguments of
            `forward`, and the readers of the plan (or None).
    """

    class Function(torch.autograd.Function):
        # With a `setup_context`, PyTorch inspects the signature in every call, which takes longer than a small tensor.
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
                inputs = x, coefficients, state
                found = gradients(lambda x, c, h: weighted_sum(x, c, h, sources).to(x.dtype), inputs, grad_y)
                return *found, None, None
            return *backward(grad_y, x, coefficients, state, sources, readers), None, None

    def shift(x: Tensor, coefficients: Tensor, state: Tensor, plan: ShiftPlan | None) -> Tensor:
        sources, readers = (None, None) if plan is None else (plan.sources, plan.readers)
        if torch.is_grad_enabled() and (x.requires_grad or coefficients.requires_grad or state.requires_grad):
            return cast(Tensor, Function.apply(x, coefficients, state, sources, readers))
        return forward(x, coefficients, state, sources)

    return shift


def shift_eager(x: Tensor, coefficients: Tensor, state: Tensor, plan: ShiftPlan | None) -> Tensor:
    """See `Shift`."""
    if x.shape[0] * x.shape[1] == 0:  # no token to look up or sum over
        return shift_traceable(x, coefficients, state, plan)
    if plan is None and torch.compiler.is_compiling():  # the compiler fuses it with the reads
        plan = plan_without_boundaries(x.shape[1], coefficients.shape[1], state.shape[1], x.device)
    return _shift_in_blocks(x, coefficients, state, plan)


def _forward(x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None) -> Tensor:
    lags = _lags(coefficients, x)

    def block(start: int, end: int, out: Tensor | None) -> Tensor:
        return _weighted_sum(_rows_read(x, state, sources, start, end, lags), lags, out)

    return _in_blocks(x, block, lags[0].weight.dtype)


def shift_eager_backward(
    grad_y: Tensor, x: Tensor, coefficients: Tensor, state: Tensor, sources: Tensor | None, readers: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, coefficients and state; see `make_differentiable`."""
    if readers is None and torch.compiler.is_compiling():  # compiled autograd after an eager forward, without a plan
        plan = plan_without_boundaries(x.shape[1], coefficients.shape[1], by_batch(state, x).shape[1], x.device)
        sources, readers = plan.sources, plan.readers
    lags, slots = _lags(coefficients, x), by_batch(state, x).shape[1]
    dtype = lags[0].weight.dtype
    partial_sums: list[list[Tensor]] = [[] for _ in lags]  # (G, D), of each block
    products = torch.empty(0, dtype=dtype, device=x.device)  # one buffer for all blocks, as new pages cost more

    def block(start: int, end: int, out: Tensor | None) -> Tensor:
        gradients = list(_gradients_read(grad_y, sources, readers, slots, start, end, lags))
        g = gradients[0][2]
        for lag, span, rows in _rows_read(x, state, sources, start, end, lags):
            if sources is None:
                product = torch.mul(g[:, span], _cast(rows, g), out=products.resize_(rows.shape))
            else:
                product = g * rows
            if torch.compiler.is_compiling():  # fuses with the gradient of x, which reads the same rows
                product = product.sum(3, keepdim=True)
            partial_sums[lag].append(product.sum((0, 1)))
        return _weighted_sum(gradients, lags, out)

    grad_x = _in_blocks(x, block, dtype)
    grad_coefficients = torch.stack([torch.stack(sums).sum((0, 2)) for sums in partial_sums], dim=1)
    # Rows of state are read like positions before the first, but never by lag 0; without boundaries, only the newest.
    if readers is None:
        readers = readers_without_boundaries(1 - len(lags), 0, x.shape[1], len(lags), x.device)
    by_lag = readers[:, :slots].unbind(2)
    newest = _weighted_sum([(lag, _ALL, gather_rows(grad_y, by_lag[lag])) for lag in range(1, len(lags))], lags)
    grad_state = torch.nn.functional.pad(newest, (0, 0, 0, 0, slots - newest.shape[1], 0))
    return grad_x, grad_coefficients.to(coefficients.dtype), grad_state.to(state.dtype).reshape(state.shape)


_shift_in_blocks = make_differentiable(_forward, shift_eager_backward)

_ALL = slice(None)
Terms = Iterable[tuple[int, slice, Tensor]]
"""Terms of a weighted sum: the lag, the positions of the block that it contributes to, and the rows to be weighted."""


def _rows_read(x: Tensor, state: Tensor, sources: Tensor | None, start: int, end: int, lags: list[_Lag]) -> Terms:
    """Yield the rows that positions start .. end - 1 read. Lag 0 comes first and covers all of these positions."""
    if sources is not None:
        state_BQGD, of_block = by_batch(state, x), sources[:, start:end]
        yield 0, _ALL, torch.where(of_block[:, :, 0, None, None] >= 0, x[:, start:end], 0)
        for lag in range(1, len(lags)):
            yield lag, _ALL, rows_at(x, state_BQGD, of_block[:, :, lag])
        return
    first = max(0, start - len(lags) + 1)
    window, rows = _cast(x[:, first:end], lags[0].weight), state.shape[1]
    for lag in range(len(lags)):
        first_in_x = max(start, lag)  # positions before this one read the state
        if start < lag:
            stop = min(end, lag)
            yield lag, slice(0, stop - start), state[:, rows - lag + start : rows - lag + stop]
        if first_in_x < end:
            yield lag, slice(first_in_x - start, end - start), window[:, first_in_x - lag - first : end - lag - first]


def _gradients_read(
    grad_y: Tensor, sources: Tensor | None, readers: Tensor | None, slots: int, start: int, end: int, lags: list[_Lag]
) -> Terms:
    """Yield the gradients of the positions that read rows start .. end - 1. Lag 0 comes first and covers all rows."""
    if sources is not None and readers is not None:
        real = sources[:, start:end, 0, None, None] >= 0
        yield 0, _ALL, _cast(torch.where(real, grad_y[:, start:end], 0), lags[0].weight)
        for lag in range(1, len(lags)):
            yield lag, _ALL, gather_rows(grad_y, readers[:, slots + start : slots + end, lag])
        return
    window = _cast(grad_y[:, start : end + len(lags) - 1], lags[0].weight)  # nothing follows the last position
    for lag in range(len(lags)):
        later = window[:, lag : lag + end - start]
        yield lag, slice(0, later.shape[1]), later


class _Lag(NamedTuple):
    """The coefficients of one lag. A head with a zero coefficient reads nothing, so no infinity becomes NaN."""

    weight: Tensor
    """The coefficients in the dtype of the arithmetic, in a shape that broadcasts with (G, D)."""
    zero: Tensor | None
    """Mask of the heads whose coefficient is zero, (G, 1); None if there are none."""


def _lags(coefficients_GW: Tensor, x: Tensor) -> list[_Lag]:
    """Return all W lags. Only on a CPU are the coefficients searched for zeros; elsewhere this would synchronise.

    For long inputs, the weights are expanded over D in memory, so that multiplications run over G * D elements at once.
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
    """Return the weighted sum of the terms in the dtype of the weights, written to `out` if given."""
    compiling, total = torch.compiler.is_compiling(), None
    for lag, span, rows in terms:
        weight, zero = lags[lag]
        term = _cast(rows, weight)
        if total is None:
            total = torch.mul(term, weight, out=out)
            if zero is not None:
                total = total.masked_fill(zero, 0) if compiling else total.masked_fill_(zero, 0)
        elif compiling:
            # No in-place operation, and no `to` that does nothing: torch.compile of 2.11 computes wrong gradients for
            # an autograd function whose output is a tensor that existed earlier in its forward.
            total = torch.where(cast(Tensor, zero), total, torch.addcmul(total, term, weight))
        elif zero is None:
            total[:, span].addcmul_(term, weight)
        else:
            part = total[:, span]
            part.copy_(torch.where(zero, part, torch.addcmul(part, term, weight)))
    return cast(Tensor, total)


def _cast(x: Tensor, like: Tensor) -> Tensor:
    # `to` costs a call even if it does nothing; `_weighted_sum` explains why it must be avoided in 2.11.
    return x if x.dtype == like.dtype else x.to(like.dtype)


def _in_blocks(x: Tensor, block: Callable[[int, int, Tensor | None], Tensor], dtype: torch.dtype) -> Tensor:
    """Return a tensor like x, computed by `block(start, end, out)` in `dtype` and rounded once to the dtype of x.

    Compilers and GPUs get the whole input as one block.
    """
    batch, length, heads, size = x.shape
    # In this order, a compiler makes no assumption about the length.
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
