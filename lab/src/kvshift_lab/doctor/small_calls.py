"""Small calls with random inputs: their results with a backend, and the errors allowed in them.

`kvshift doctor` makes them.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.shift import kv_shift
from kvshift.ops.state import ShiftState

HEADS, _QUERY_HEADS = 3, 5


class Kind(NamedTuple):
    """A kind of call, for which kernels are compiled.

    Attributes:
        k_size, v_size: head size of keys and of values.
        window: W; 1 if nothing is shifted.
        rotated, normed: whether the launch includes rotary embedding and QK-norm.
    """

    device: torch.device
    dtype: torch.dtype
    k_size: int
    v_size: int
    window: int
    rotated: bool = False
    normed: bool = False

    def __str__(self) -> str:
        sizes = self.k_size if self.k_size == self.v_size else f"{self.k_size} (values {self.v_size})"
        after = ", QK-norm" * self.normed + ", rotary embedding" * self.rotated
        return f"{str(self.dtype).removeprefix('torch.')}, head size {sizes}, window {self.window}{after}"


class Edge(NamedTuple):
    """A call with random inputs, and NaN on padding.

    Attributes:
        cu_seqlens, seq_idx, mask: as in `kv_shift`, but as lists.
        has_state: whether the sequences continue a state of W + 1 rows.
        strided: whether keys and values are every other position of a slice of a wider tensor.
        has_zeros: whether the first head has the coefficients (1, 0, ...), and infinities in its keys and values.
        inference: whether to omit gradients.
    """

    batch: int = 2
    positions: int = 7
    cu_seqlens: list[int] | None = None
    seq_idx: list[list[int]] | None = None
    mask: list[list[int]] | None = None
    has_state: bool = False
    strided: bool = False
    has_zeros: bool = False
    inference: bool = False


def outcome(edge: Edge, kind: Kind, backend: str, *, exact: bool = False) -> dict[str, Tensor]:
    """Return all results of a call by name, and all gradients, except in inference and for rotation with a state.

    Args:
        exact: whether to compute with the same inputs in float64.
    """
    generator = torch.Generator().manual_seed(20)
    wide = torch.float64 if exact else None

    def given(x: Tensor, dtype: torch.dtype = kind.dtype) -> Tensor:
        return x.to(dtype).to(kind.device, wide)

    def normal(*shape: int, dtype: torch.dtype = kind.dtype) -> Tensor:
        return given(torch.randn(shape, generator=generator, dtype=torch.float64), dtype)

    (batch, positions), (k_size, v_size, window) = edge[:2], kind[2:5]
    sequences, rows = batch if edge.cu_seqlens is None else len(edge.cu_seqlens) - 1, window + 1
    q = normal(batch, positions, _QUERY_HEADS, k_size) if kind.rotated else None
    k, v = (normal(batch, positions, HEADS, size) for size in (k_size, v_size))
    alpha, beta = (normal(HEADS, window, dtype=torch.float32) if window > 1 else None for _ in "kv")
    rows_of = [normal(sequences, rows, HEADS, size) for size in (k_size, v_size)]
    bounds = {name: getattr(edge, name) for name in ("cu_seqlens", "seq_idx", "mask")}
    bounds = {name: None if x is None else torch.tensor(x, device=kind.device) for name, x in bounds.items()}
    mask = bounds["mask"] = None if bounds["mask"] is None else bounds["mask"].bool()
    for x, coefficients in ((k, alpha), (v, beta)):
        if mask is not None and window > 1:  # without a shift, padding is a token like any other
            x[~mask] = torch.nan
        if edge.has_zeros and coefficients is not None:
            coefficients[0] = torch.eye(1, window, device=kind.device)[0]
            x[0, 2, 0] = torch.inf
    if edge.strided:
        k, v = map(_strided, (k, v))
    leaves = {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}
    state = rotary = norms = None
    if edge.has_state and window > 1:
        state = ShiftState(rows_of[0], rows_of[1], rows)
        leaves |= {"state.k": state.k, "state.v": state.v}
    if kind.rotated:
        angles = torch.randn(batch, positions, 1, k_size // 2, generator=generator)
        rotary = given(angles.cos(), torch.float32), given(angles.sin(), torch.float32)
    if kind.normed:
        norms = nn.RMSNorm(k_size, 1e-6), nn.RMSNorm(k_size, 1e-6)
        for name, norm in zip("qk", norms, strict=True):
            leaves[f"gain of {name}"] = norm.weight = nn.Parameter(normal(k_size))
    if edge.has_zeros:  # their gradients are not finite
        leaves |= {"alpha": None, "beta": None}
    leaves = {name: x for name, x in leaves.items() if x is not None}
    differentiable = not (edge.inference or (kind.rotated and state is not None))
    with torch.set_grad_enabled(differentiable):
        for x in leaves.values():
            x.requires_grad_(differentiable)
        where: dict[str, Any] = {"state": state, "backend": backend, **bounds}
        if kind.rotated:
            *outputs, new = shift_norm_rope(q, k, v, alpha, beta, rotary=rotary, norms=norms, **where)
        else:
            *outputs, new = kv_shift(k, v, alpha, beta, **where)
        results: dict[str, Any] = dict(zip("qkv" if kind.rotated else "kv", outputs, strict=True))
        if new is not None:
            results |= {"new state.k": new.k, "new state.v": new.v}
        upstream = [normal(*y.shape) for y in results.values()]
        pairs = [(y, gradient) for y, gradient in zip(results.values(), upstream, strict=True) if y.requires_grad]
        if pairs:
            ys, gradients = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(ys, list(leaves.values()), gradients, materialize_grads=True)
            results |= {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in results.items()}


def difference(results: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> str | None:
    """Describe the first result that is wrong, and its error; None if all are right. The error allowed in an element is

        (2 eps(dtype of the result) + 1024 eps(dtype of the arithmetic)) max |exact|        max over the finite elements

    The error of a wrong row is about as large as the largest element. Errors of right sums were at most 4 eps of the
    arithmetic, except 66 eps for alpha before a norm, where terms nearly cancel. Infinities must be the same.
    """
    arithmetic = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for name, expected in exact.items():
        result = results[name].to(expected.device, torch.float64)
        if result.shape != expected.shape:
            return f"{name} is of shape {tuple(result.shape)}, not {tuple(expected.shape)}"
        largest = torch.where(expected.isfinite(), expected, 0).abs().max().item() if expected.numel() else 0.0
        allowed = (2 * torch.finfo(results[name].dtype).eps + 1024 * arithmetic) * largest
        error = torch.where(result == expected, 0, (result - expected).abs())
        off = ~(error <= allowed)  # true for NaN too
        if off.any():
            at = tuple(off.nonzero()[0].tolist())
            return (
                f"{name}: {int(off.sum())} of {off.numel()} elements are off, the first at {at}: "
                f"{result[at].item():.6g}, not {expected[at].item():.6g} (allowed {allowed:.1g})"
            )
    return None


def _strided(x: Tensor) -> Tensor:
    """Return x as a view into a tensor (B, G, 2 T, D + 3) whose other elements are NaN."""
    batch, positions, heads, size = x.shape
    wide = x.new_full((batch, heads, 2 * positions, size + 3), torch.nan)
    return wide.transpose(1, 2)[:, ::2, :, 1 : size + 1].copy_(x)
