"""The shapes of flash-linear-attention's tests of token shift and short convolutions, against a loop.

Its operators need a GPU, so that only sizes are taken from its tests/modules/test_token_shift.py and test_conv.py
(0.6.0): rows, positions, channels, taps, where documents begin. A convolution with W taps for each channel is a shift
by a window of W whose heads have one channel each; token shift is one head with the window 2.

Shapes: B batch, T positions, C channels, S sequences, G heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvshift import ShiftState, kv_shift

from ..ops.cases import boundaries, normal_numbers

TOKEN_SHIFT_BTC = [(2, 512, 1024), (4, 512, 2560), (1, 8192, 1024)]
PACKS = [(0, 4, 7, 40, 128), (0, 10, 20, 64), (0, 32), (0, 1, 3, 4), (0, 4097, 8200, 12304)]
CONVOLUTIONS_BTCW = [(2, 64, 128, 3), (2, 128, 128, 4), (2, 500, 1024, 3), (2, 1024, 1024, 4)]
PROMPTS_BTCW = [(2, 64, 128, 3), (2, 128, 128, 4), (2, 2, 128, 4), (2, 3, 128, 4), (2, 4, 128, 4), (2, 2, 128, 3)]
PACKED_CONVOLUTIONS_STCW = [(3, 128, 64, 4), (4, 256, 128, 3), (2, 3, 64, 4), (2, 3, 64, 3), (4, 1024, 200, 4)]
BACKENDS = ["cpu", "eager"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclass
class Result:
    """The results for keys or values: the output, the state after the call, and the gradients."""

    y: Tensor
    state: Tensor
    grad_x: Tensor
    grad_coefficients: Tensor
    grad_state: Tensor | None


def loop(x: Tensor, coefficients: Tensor, state: Tensor | None, ends: Sequence[int] | None, grad_y: Tensor) -> Result:
    """Compute in float64, position by position. x (B, T, G, D), or (1, T, G, D) with the `ends` of its sequences."""
    x, coefficients, grad_y = x.double(), coefficients.double(), grad_y.double()
    window = coefficients.shape[1]
    if ends is not None:
        parts = [slice(start, end) for start, end in pairwise(ends)]
        rows = [None if state is None else state[i : i + 1] for i in range(len(parts))]
        results = [loop(x[:, p], coefficients, row, None, grad_y[:, p]) for p, row in zip(parts, rows, strict=True)]
        return Result(
            torch.cat([one.y for one in results], 1),
            torch.cat([one.state for one in results]),
            torch.cat([one.grad_x for one in results], 1),
            torch.stack([one.grad_coefficients for one in results]).sum(0),
            None if state is None else torch.cat([one.grad_state for one in results]),
        )
    before = torch.zeros_like(x[:, :1]).repeat(1, window - 1, 1, 1) if state is None else state.double()
    read = torch.cat([before, x], 1)
    y, grad_read, grad_coefficients = torch.zeros_like(x), torch.zeros_like(read), torch.zeros_like(coefficients)
    first = before.shape[1]
    for t in range(x.shape[1]):
        for lag in range(window):
            weight, row = coefficients[:, lag, None], read[:, first + t - lag]
            y[:, t] += weight * row
            grad_read[:, first + t - lag] += weight * grad_y[:, t]
            grad_coefficients[:, lag] += (grad_y[:, t] * row).sum((0, 2))
    grad_state = None if state is None else grad_read[:, :first]
    return Result(y, read[:, read.shape[1] - first :], grad_read[:, first:], grad_coefficients, grad_state)


def check(
    shape: tuple[int, ...],
    window: int,
    dtype: torch.dtype,
    *,
    ends: Sequence[int] | None = None,
    with_state: bool = False,
) -> None:
    """Compare `kv_shift` of random keys and values, forward and backward, with the loop."""
    normal = normal_numbers(3, dtype)
    heads = shape[2]
    inputs = [(normal(*shape), normal(heads, window, dtype=torch.float32), normal(*shape)) for _ in ("k", "v")]
    states: list[Tensor | None] = [None, None]
    if with_state:
        sequences = shape[0] if ends is None else len(ends) - 1
        states = [normal(sequences, window - 1, *shape[2:]) for _ in ("k", "v")]
    expected = [
        loop(x, coefficients, before, ends, grad_y)
        for (x, coefficients, grad_y), before in zip(inputs, states, strict=True)
    ]
    for backend in BACKENDS:
        for result, due in zip(results(inputs, states, ends, backend), expected, strict=True):
            torch.testing.assert_close(result.y, due.y.to(dtype))
            torch.testing.assert_close(result.state, due.state[:, -result.state.shape[1] :].to(dtype), rtol=0, atol=0)
            torch.testing.assert_close(result.grad_x, due.grad_x.to(dtype))
            if due.grad_state is not None:
                torch.testing.assert_close(result.grad_state, due.grad_state.to(dtype))
            # A sum over all tokens, which may cancel: its error is that of its terms.
            error = (result.grad_coefficients - due.grad_coefficients).norm() / due.grad_coefficients.norm()
            assert error < 1e-5


def results(
    inputs: list[tuple[Tensor, Tensor, Tensor]],
    states: list[Tensor | None],
    ends: Sequence[int] | None,
    backend: str,
) -> list[Result]:
    """Return what `kv_shift` computes for keys and for values."""
    (k, alpha, grad_k), (v, beta, grad_v) = ([x.clone().requires_grad_() for x in part] for part in inputs)
    before = [None if x is None else x.clone().requires_grad_() for x in states]
    state = None if before[0] is None else ShiftState(*before, max_rows=alpha.shape[1] - 1)
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    k_hat, v_hat, after = kv_shift(k, v, alpha, beta, state=state, cu_seqlens=cu_seqlens, backend=backend)
    torch.autograd.backward((k_hat, v_hat), (grad_k, grad_v))
    return [
        Result(y.detach(), kept.detach(), x.grad, coefficients.grad, None if row is None else row.grad)
        for y, kept, x, coefficients, row in zip(
            (k_hat, v_hat), (after.k, after.v), (k, v), (alpha, beta), before, strict=True
        )
    ]


@dtypes
@pytest.mark.parametrize("shape", TOKEN_SHIFT_BTC, ids=str)
def test_token_shift(shape, dtype):
    batch, positions, channels = shape
    check((batch, positions, 1, channels), 2, dtype)


@dtypes
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("ends", PACKS, ids=str)
def test_packed_token_shift(ends, with_state, dtype):
    check((1, ends[-1], 1, 32), 2, dtype, ends=ends, with_state=with_state)


@dtypes
@pytest.mark.parametrize("shape", CONVOLUTIONS_BTCW, ids=str)
def test_convolution(shape, dtype):
    batch, positions, channels, window = shape
    check((batch, positions, channels, 1), window, dtype)


@dtypes
@pytest.mark.parametrize("shape", PROMPTS_BTCW, ids=str)
def test_convolution_that_continues_a_prompt(shape, dtype):
    batch, positions, channels, window = shape
    check((batch, positions, channels, 1), window, dtype, with_state=True)


@dtypes
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("shape", PACKED_CONVOLUTIONS_STCW, ids=str)
def test_packed_convolution(shape, with_state, dtype):
    sequences, positions, channels, window = shape
    lengths = [positions // sequences] * (sequences - 1)
    ends = boundaries([*lengths, positions - sum(lengths)]).tolist()
    check((1, positions, channels, 1), window, dtype, ends=ends, with_state=with_state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", PROMPTS_BTCW, ids=str)
def test_decoding_token_by_token(shape, backend):
    batch, positions, channels, window = shape
    normal = normal_numbers(4, torch.float32)
    k, v = normal(batch, positions, channels, 1), normal(batch, positions, channels, 1)
    alpha, beta = normal(channels, window), normal(channels, window)
    whole = kv_shift(k, v, alpha, beta, backend=backend)
    state, steps = ShiftState(None, None, window - 1), []
    for t in range(positions):
        *step, state = kv_shift(k[:, t, None], v[:, t, None], alpha, beta, state=state, backend=backend)
        steps.append(step)
    for y, expected in zip((torch.cat(ys, 1) for ys in zip(*steps, strict=True)), whole[:2], strict=True):
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert state == whole[2]
