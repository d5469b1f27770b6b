"""Calls of `turn_triton` to test, the plain formula for them, and how far rounding may take a result from it.

Shapes: B batch, T positions, S sequences, R rows of history, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kvshift.layers.positions import half_tables, rotate_half
from kvshift.ops import shift_tokens
from kvshift.ops.triton.call import Boundaries, turn_triton

from .cases import boundaries, lay_out, spread

Outputs = tuple[Tensor | None, Tensor, Tensor]
LEAVES = ("q", "k", "v", "alpha", "beta", "q_scale", "k_scale")
_NUMBERS = (*LEAVES, "cos", "sin", "k_past", "v_past")


@dataclass(frozen=True)
class Turn:
    """One call of `turn_triton`, and the gradients that come back to its three results."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    alpha: Tensor | None
    beta: Tensor | None
    cos: Tensor
    sin: Tensor
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    eps: float = 0.0
    k_past: Tensor | None = None
    v_past: Tensor | None = None
    cu_seqlens: Tensor | None = None
    seq_idx: Tensor | None = None
    mask: Tensor | None = None
    grads: tuple[Tensor, ...] = ()

    def where(self) -> dict[str, Any]:
        return {"cu_seqlens": self.cu_seqlens, "seq_idx": self.seq_idx, "mask": self.mask}

    def map(self, fn: Callable[[Tensor], Tensor]) -> Turn:
        """The same call with `fn` applied to every tensor of numbers."""
        changed: dict[str, Any] = {name: fn(x) for name in _NUMBERS if (x := getattr(self, name)) is not None}
        return replace(self, **changed, grads=tuple(map(fn, self.grads)))


def random_turn(
    seed: int,
    batch: int = 2,
    positions: int = 5,
    *,
    queries: int | None = 5,
    heads: int = 3,
    k_dim: int = 6,
    v_dim: int = 7,
    window: int = 2,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    tables: int = 1,
    norm: bool = True,
    shifted: str = "kv",
    rows: int | None = None,
    lengths: Sequence[int] | None = None,
    seq_idx: Sequence[Sequence[int]] | None = None,
    mask: Sequence[Sequence[int]] | None = None,
    layout: str = "plain",
    grad_layout: str = "plain",
) -> Turn:
    """Normal numbers, tables included; arguments as in `random_case`.

    Args:
        queries: H, or None: without queries.
        tables: L.
        shifted: which of "k" and "v" have coefficients.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    if lengths is not None:
        batch, positions = 1, sum(lengths)
    sequences = batch if lengths is None else len(lengths)
    shapes = [
        (batch, positions, queries or 0, k_dim),
        (batch, positions, heads, k_dim),
        (batch, positions, heads, v_dim),
    ]
    q, k, v = (lay_out(normal(*shape), layout) for shape in shapes)
    grads = [
        spread(normal(1), shape) if grad_layout == "expanded" else lay_out(normal(*shape), grad_layout)
        for shape in shapes
    ]
    mixes = [normal(heads, window, dtype=torch.float32) for _ in range(2)]
    table = [normal(tables, positions, k_dim // 2, dtype=table_dtype or dtype) for _ in range(2)]
    scales = [normal(k_dim, dtype=scale_dtype or dtype) for _ in range(2)]
    past = [None if rows is None else normal(sequences, rows, *shape[2:]) for shape in shapes[1:]]
    return Turn(
        None if queries is None else q,
        k,
        v,
        mixes[0] if "k" in shifted else None,
        mixes[1] if "v" in shifted else None,
        *table,
        *(scales if norm else ()),
        eps=0.25 if norm else 0.0,
        k_past=past[0],
        v_past=past[1],
        cu_seqlens=None if lengths is None else boundaries(lengths),
        seq_idx=None if seq_idx is None else torch.tensor(seq_idx, dtype=torch.long),
        mask=None if mask is None else torch.tensor(mask, dtype=torch.bool),
        grads=tuple(grads),
    )


def turned(turn: Turn) -> Outputs:
    """By the kernels."""
    q, k, v = turn_triton(
        turn.q,
        turn.k,
        turn.v,
        turn.alpha,
        turn.beta,
        turn.cos,
        turn.sin,
        q_scale=turn.q_scale,
        k_scale=turn.k_scale,
        eps=turn.eps,
        k_past=turn.k_past,
        v_past=turn.v_past,
        boundaries=Boundaries.of(**turn.where()),
    )
    return None if turn.q is None else q, k, v


def formula(turn: Turn) -> Outputs:
    """Shift, then norm, then rotation, as they are written down."""

    def finish(x: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + turn.eps) * scale
        low, high = x.chunk(2, dim=-1)
        cos, sin = turn.cos.unsqueeze(2), turn.sin.unsqueeze(2)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    k, v = (
        x if mix is None else shift_tokens(x, mix, history=past, **turn.where(), backend="eager")[0]
        for x, mix, past in ((turn.k, turn.alpha, turn.k_past), (turn.v, turn.beta, turn.v_past))
    )
    return None if turn.q is None else finish(turn.q, turn.q_scale), finish(k, turn.k_scale), v


def unfused(turn: Turn) -> Outputs:
    """One operation of PyTorch after the other, in the dtype of the tensors, for rows without boundaries or history."""
    table = half_tables(turn.cos.repeat(1, 1, 2), turn.sin.repeat(1, 1, 2))

    def shift(x: Tensor, mix: Tensor | None) -> Tensor:
        if mix is None:
            return x
        lags = (F.pad(x, (0, 0, 0, 0, lag, 0))[:, : x.shape[1]] for lag in range(mix.shape[1]))
        weights = mix.to(x.dtype).unsqueeze(2).unbind(1)
        return cast(Tensor, sum(weight * before for weight, before in zip(weights, lags, strict=True)))

    def finish(x: Tensor, scale: Tensor | None) -> Tensor:
        return rotate_half(x if scale is None else F.rms_norm(x, scale.shape, scale, turn.eps), table)

    q = None if turn.q is None else finish(turn.q, turn.q_scale)
    return q, finish(shift(turn.k, turn.alpha), turn.k_scale), shift(turn.v, turn.beta)


def outcome(turn: Turn, op: Callable[[Turn], Outputs] = turned) -> dict[str, Tensor]:
    """Everything that a call gives, by name: results, and the gradients of all inputs; none through a history."""
    turn = turn.map(lambda x: x.detach())
    leaves = {name: x for name in LEAVES if (x := getattr(turn, name)) is not None}
    for x in leaves.values() if turn.k_past is None else ():
        x.requires_grad_()
    outputs = {name: x for name, x in zip("qkv", op(turn), strict=True) if x is not None}
    results = {name: x.detach() for name, x in outputs.items()}
    if turn.k_past is None:
        upstream = [grad for name, grad in zip("qkv", turn.grads, strict=True) if name in outputs]
        given = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), upstream, allow_unused=True, materialize_grads=True
        )
        results |= {f"gradient of {name}": x for name, x in zip(leaves, given, strict=True)}
    return results


# How far rounding may take a result --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounded:
    """Exact numbers, and how far off they can be where every operation is rounded by `unit` of its result at most.

    The rules are those of a running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section
    3.3). The norm and the rotation make small numbers of large ones, so the bound of an element is a share of what it
    was made of, not of itself.
    """

    value: Tensor
    error: Tensor
    unit: float

    def __mul__(self, other: Rounded) -> Rounded:
        error = self.error * other.size() + self.value.abs() * other.error
        return self._rounded(self.value * other.value, error)

    def __add__(self, other: Rounded) -> Rounded:
        return self._rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rounded) -> Rounded:
        return self + Rounded(-other.value, other.error, self.unit)

    def sum(self, *dims: int) -> Rounded:
        """In any order."""
        terms = math.prod(self.value.shape[dim] for dim in dims)
        error = (self.error + self.of_terms(terms) * self.size()).sum(dims, keepdim=True)
        return Rounded(self.value.sum(dims, keepdim=True), error, self.unit)

    def size(self) -> Tensor:
        return self.value.abs() + self.error

    def of_terms(self, n: int) -> float:
        """The error of a sum of n terms, as a share of that of their absolute values."""
        return n * self.unit / (1 - n * self.unit)

    def _rounded(self, value: Tensor, error: Tensor) -> Rounded:
        return Rounded(value, error + self.unit * (value.abs() + error), self.unit)


def results_with_bounds(turn: Turn, unit: float) -> dict[str, Rounded]:
    """`outcome` of a call without history by hand, for a call in fp64, with the bounds of arithmetic of that unit."""

    def given(x: Tensor) -> Rounded:
        return Rounded(x, torch.zeros_like(x), unit)

    cos, sin = given(turn.cos.unsqueeze(2)), given(turn.sin.unsqueeze(2))
    one_in_d = given(turn.k.new_tensor(1 / turn.k.shape[3]))

    def rotated(x: Rounded, sin: Rounded) -> Rounded:
        halved = zip(x.value.chunk(2, -1), x.error.chunk(2, -1), strict=True)
        low, high = (Rounded(value, error, unit) for value, error in halved)
        parts = low * cos - high * sin, high * cos + low * sin
        return Rounded(torch.cat([x.value for x in parts], -1), torch.cat([x.error for x in parts], -1), unit)

    def inverse_norm(x: Rounded) -> Rounded:
        mean = (x * x).sum(-1) * one_in_d + given(turn.k.new_tensor(turn.eps))
        value = mean.value.rsqrt()
        # The root of a GPU is right to two places, 4 units.
        return Rounded(value, (1 + 4 * unit) * (mean.value - mean.error).rsqrt() - value, unit)

    def finish(name: str, x: Rounded, scale: Tensor | None, upstream: Tensor) -> Rounded:
        """Notes the result and the gradient of the scale; returns the gradient of x."""
        gradient = rotated(given(upstream), Rounded(-sin.value, sin.error, unit))
        if scale is None:
            results[name] = rotated(x, sin)
            return gradient
        inverse = inverse_norm(x)
        normed = x * inverse
        results[name] = rotated(x * (inverse * given(scale)), sin)
        results[f"gradient of {name}_scale"] = (gradient * normed).sum(0, 1, 2)
        scaled = gradient * given(scale)
        along = (scaled * normed).sum(-1) * one_in_d
        return inverse * (scaled - normed * along)

    def through_shift(x: Tensor, mix: Tensor) -> Rounded:
        size = _shift(x.abs(), mix.abs(), turn)
        return Rounded(_shift(x, mix, turn), given(x).of_terms(mix.shape[1]) * size, unit)

    def back_through_shift(name: str, mix_name: str, x: Tensor, mix: Tensor | None, gradient: Rounded) -> None:
        if mix is None:
            results[f"gradient of {name}"] = gradient
            return
        value, mix_value = _shift_backward(x, mix, turn, gradient.value)
        sums = gradient.error + gradient.of_terms(mix.shape[1]) * gradient.size()
        error, _ = _shift_backward(x, mix.abs(), turn, sums)
        sums = gradient.error + gradient.of_terms(x[:, :, 0].numel()) * gradient.size()
        _, mix_error = _shift_backward(x.abs(), mix, turn, sums)
        results[f"gradient of {name}"] = Rounded(value, error, unit)
        results[f"gradient of {mix_name}"] = Rounded(mix_value, mix_error, unit)

    results: dict[str, Rounded] = {}
    if turn.q_scale is not None:
        results["gradient of q_scale"] = given(torch.zeros_like(turn.q_scale))
    if turn.q is not None:
        results["gradient of q"] = finish("q", given(turn.q), turn.q_scale, turn.grads[0])
    k = given(turn.k) if turn.alpha is None else through_shift(turn.k, turn.alpha)
    back_through_shift("k", "alpha", turn.k, turn.alpha, finish("k", k, turn.k_scale, turn.grads[1]))
    results["v"] = given(turn.v) if turn.beta is None else through_shift(turn.v, turn.beta)
    back_through_shift("v", "beta", turn.v, turn.beta, given(turn.grads[2]))
    return results


def _shift(x: Tensor, mix: Tensor, turn: Turn) -> Tensor:
    return shift_tokens(x, mix, **turn.where(), backend="eager")[0]


def _shift_backward(x: Tensor, mix: Tensor, turn: Turn, gradient: Tensor) -> tuple[Tensor, ...]:
    leaves = x.detach().clone().requires_grad_(), mix.detach().clone().requires_grad_()
    return torch.autograd.grad(_shift(*leaves, turn), leaves, gradient)
