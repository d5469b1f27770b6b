"""Shift, QK-norm and rotary embedding together, as attention wants them: in one launch where the kernels can.

Shapes: B batch, T positions, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kvshift.ops.decode import CoefficientCache, next_token
from kvshift.ops.dispatch import (
    Call,
    FusedPath,
    Norms,
    compiles_training,
    fused_path,
    norm_scales,
)
from kvshift.ops.inputs import Inputs
from kvshift.ops.reference import norm_rope_reference
from kvshift.ops.rope import Rotary, rotate_heads
from kvshift.ops.shift import (
    check_boundaries,
    check_coefficients,
    check_input,
    check_queries,
    check_state,
    shift_keys_values,
    shift_tokens,
    with_plan,
)
from kvshift.ops.state import ShiftState
from kvshift.ops.triton.call import shift_triton

Results = tuple[Tensor | None, Tensor, Tensor, ShiftState | None]

_DDP_TAKES_CHECKPOINTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch.compile can cut a graph with a checkpoint into DDP's buckets: 2.13 does; see pytorch issue 104674."""


def shift_norm_rope(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None = None,
    *,
    rotary: Rotary | None = None,
    norms: Norms | None = None,
    state: ShiftState | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    keep_state: bool = True,
    backend: str = "auto",
    kept: CoefficientCache | None = None,
) -> Results:
    """Shift, then normalise queries and keys, then rotate them.

        q, k, v = shift(q, gamma), shift(k, alpha), shift(v, beta)       as `kvshift.kv_shift`
        q, k = norms[0](q), norms[1](k)                                  x / sqrt(mean(x^2) + eps) * weight, over D
        q, k = rotate(q, rotary), rotate(k, rotary)                      `kvshift.ops.rope`

    In one launch all is in fp32 (fp64 for fp64) and rounded once; otherwise each of the three rounds.

    Args:
        q: (B, T, H, D), or None: keys and values alone. k: (B, T, G, D), v: (B, T, G, Dv).
        alpha, beta: (G, W), gamma: (H, W); None: not shifted.
        rotary, norms: None: not rotated, not normalised.
        state: as in `kv_shift`, with queries where there is gamma. Looked at only if something is shifted.
        cu_seqlens, seq_idx, mask, backend: as in `kv_shift`.
        keep_state: False where no later call needs the new state.
        kept: what the caller keeps of alpha and beta for generation.

    Returns:
        q, k, v and the new state; None where it is not kept or nothing is shifted.
    """
    states, max_rows = ((state.k, state.v), state.max_rows) if isinstance(state, ShiftState) else ((None, None), None)
    boundaries = (cu_seqlens, seq_idx, mask)
    call = Call((k, v), (alpha, beta), states, boundaries, backend, q, gamma is not None, rotary, norms, max_rows)
    path = fused_path(call)
    if path == "next token":
        return next_token(call, kept or CoefficientCache(), keep_state=keep_state)
    return run(path, call, gamma, state, keep_state=keep_state)


def run(path: FusedPath, call: Call, gamma: Tensor | None, state: ShiftState | None, *, keep_state: bool) -> Results:
    """`shift_norm_rope` on a path that was chosen, which is not "next token"."""
    if path == "launch":
        results = _launch(call, state, keep_state)
    else:
        results = _unfused(call, gamma, state, _finish_by_loops if path == "reference" else _finish, keep_state)
    return results if keep_state else (*results[:3], None)


def _launch(call: Call, state: ShiftState | None, keep_state: bool) -> Results:
    (k, v), (alpha, beta), (k_state, v_state) = call.inputs, call.coefficients, call.states
    _check(call.q, k, v)
    sequences = check_boundaries(k, *call.boundaries)
    for name, coefficients in (("alpha", alpha), ("beta", beta)):
        if coefficients is not None:
            check_coefficients(name, coefficients, k)
    if state is not None:
        check_state(state, k, v, sequences, call.window())
    rotary, norms = cast(Rotary, call.rotary), call.norms
    q_scale, k_scale, eps = norm_scales(norms)
    cos, sin = _half_tables(rotary, k)
    given = Inputs(call.q, k, v, alpha, beta, k_state, v_state, cos, sin, q_scale, k_scale)
    given = with_plan(given, *call.boundaries)
    max_rows = 0 if not keep_state or call.window() == 1 else call.window() - 1 if state is None else state.max_rows

    def shifted(x: Inputs) -> tuple[Any, ...]:
        return shift_triton(x, eps, sequences=sequences, max_rows=max_rows)

    if compiles_training():
        q_hat, _ = _finish(call.q, None, norms, rotary)
        alone = given._replace(q=None, q_scale=None)
        k_hat, v_hat, *next_rows = compiled_to_recompute(
            lambda k, v: tuple(y for y in shifted(alone._replace(k=k, v=v)) if y is not None), k, v
        )
    else:
        q_hat, k_hat, v_hat, *next_rows = shifted(given)
    return q_hat, k_hat, v_hat, ShiftState(next_rows[0], next_rows[1], max_rows) if max_rows else None


def compiled_to_recompute(function: Callable[..., Any], k: Tensor, v: Tensor) -> Any:
    """Shifted k and v, as a compiler is to see them in training.

    It keeps the raw ones for backward, which the gradients of the coefficients need anyway, and recomputes the others
    there: what `kvshift.layers.recompute` does where nothing is compiled.
    """
    if not _DDP_TAKES_CHECKPOINTS and DistributedDataParallel._active_ddp_module is not None:
        return function(k, v)
    return checkpoint(function, k, v, use_reentrant=False, preserve_rng_state=False)


def _unfused(
    call: Call, gamma: Tensor | None, state: ShiftState | None, finish: Callable[..., Any], keep_state: bool
) -> Results:
    """One after the other; `finish` is norm and rotation."""
    q, (k, v), (alpha, beta) = call.q, call.inputs, call.coefficients
    k_hat, v_hat, new = k, v, None
    if alpha is None and beta is None and gamma is None:
        _check(q, k, v)
        check_boundaries(k, *call.boundaries)
    else:
        cu_seqlens, seq_idx, mask = call.boundaries
        where: dict[str, Any] = {
            "cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "mask": mask, "backend": call.backend,
        }  # fmt: skip
        hold = alpha
        if alpha is None and beta is None:  # the state holds keys all the same, so that it has one shape
            hold = torch.eye(1, cast(Tensor, gamma).shape[1], device=k.device).expand(k.shape[2], -1)
        k_hat, v_hat, new = shift_keys_values(k, v, hold, beta, state=state, keep_state=keep_state, q=q, **where)
        if alpha is None:
            k_hat = k
        if gamma is not None and q is not None:
            q, rows = _shift_queries(q, gamma, k, state, where)
            new = None if new is None else ShiftState(new.k, new.v, new.max_rows, rows)
    return *finish(q, k_hat, call.norms, call.rotary), v_hat, new


def _shift_queries(
    q: Tensor, gamma: Tensor, k: Tensor, state: ShiftState | None, where: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if q.ndim != 4 or q.shape[:3] != (*k.shape[:2], gamma.shape[0]):
        raise ValueError(
            f"q must be ({k.shape[0]}, {k.shape[1]}, {gamma.shape[0]}, head size) beside these keys, "
            f"got {tuple(q.shape)}"
        )
    if state is not None and state.q is None:
        raise ValueError("state holds no queries, but this layer shifts them: pass on the state it returned")
    before, max_rows = (None, None) if state is None else (state.q, state.max_rows)
    return shift_tokens(q, gamma, state=before, max_rows=max_rows, **where)


def _check(q: Tensor | None, k: Tensor, v: Tensor) -> None:
    check_queries(q)
    check_input("k", k)
    check_input("v", v)


def _half_tables(rotary: Rotary, k: Tensor) -> Rotary:
    """(L, T, D/2), as the kernels read them."""
    cos, sin = rotary[0].squeeze(2), rotary[1].squeeze(2)
    half = k.shape[3] // 2
    return (cos, sin) if cos.shape[-1] == half else (cos[..., :half], sin[..., half:])  # the first half is negated


def _finish(
    q: Tensor | None, k: Tensor | None, norms: Norms | None, rotary: Rotary | None
) -> tuple[Tensor | None, Any]:
    if norms is not None:
        q, k = q if q is None else norms[0](q), k if k is None else norms[1](k)
    return (q, k) if rotary is None else rotate_heads(q, k, rotary)


def _finish_by_loops(
    q: Tensor | None, k: Tensor, norms: Norms | None, rotary: Rotary | None
) -> tuple[Tensor | None, Tensor]:
    q_norm, k_norm = norms or (None, None)
    return (None if q is None else _norm_rope(q, q_norm, rotary)), _norm_rope(k, k_norm, rotary)


def _norm_rope(x: Tensor, norm: nn.Module | None, rotary: Rotary | None) -> Tensor:
    scale, _, eps = norm_scales(None if norm is None else (norm, norm))
    return norm_rope_reference(x, scale, eps, rotary)
