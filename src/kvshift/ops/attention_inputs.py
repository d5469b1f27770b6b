"""Shift, QK-norm and rotary embedding of the inputs of attention, in one launch if the kernels can.

Shapes: B batch, T positions, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kvshift.ops.arguments import Call, Norms
from kvshift.ops.decode import CoefficientCache, next_token
from kvshift.ops.dispatch import (
    fused_path,
    gain_and_epsilon,
    is_compiling_training,
    launch_key,
)
from kvshift.ops.reference import norm_rope_reference
from kvshift.ops.rope import Rotary, apply_rotary
from kvshift.ops.shift import check_call, shift_keys_values, shift_tokens, unpack_state, with_plan
from kvshift.ops.state import ShiftState
from kvshift.ops.triton.call import shift_triton, was_launched
from kvshift.ops.triton.compiled_launch import LaunchKey

Results = tuple[Tensor | None, Tensor, Tensor, ShiftState | None]

_DDP_TAKES_CHECKPOINTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch.compile can split a graph with a checkpoint into DDP's buckets (pytorch issue 104674)."""


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
    coefficient_cache: CoefficientCache | None = None,
) -> Results:
    """Shift queries, keys and values, then normalise and rotate queries and keys.

        q, k, v = shift(q, gamma), shift(k, alpha), shift(v, beta)       as `kvshift.kv_shift`
        q, k = norms[0](q), norms[1](k)                                  x / sqrt(mean(x^2) + eps) * weight, over D
        q, k = rotate(q, rotary), rotate(k, rotary)                      `kvshift.ops.rope`

    One launch computes in fp32 (fp64 for fp64) and rounds once; otherwise each of the three steps rounds.

    Args:
        q: (B, T, H, D), or None for keys and values alone. k: (B, T, G, D). v: (B, T, G, Dv).
        alpha, beta, gamma: (G, W), (G, W) and (H, W). If None, that tensor is not shifted.
        rotary, norms: tables and modules for queries and keys. If None, they are not rotated or not normalised.
        state: as in `kv_shift`, with queries if gamma is given. Used only if something is shifted.
        cu_seqlens, seq_idx, mask, backend: as in `kv_shift`.
        keep_state: False if no later call needs the new state.
        coefficient_cache: the caller's cache of alpha and beta for generation.

    Returns:
        q, k, v and the new state, which is None if it is not kept or nothing is shifted.
    """
    k_state, v_state, q_state, max_rows = unpack_state(state)
    cos, sin = rotary or (None, None)
    call = Call(
        q, k, v, alpha, beta, k_state, v_state, cos, sin, cu_seqlens=cu_seqlens, seq_idx=seq_idx, mask=mask,
        norms=norms, gamma=gamma, q_state=q_state, max_rows=max_rows if keep_state else 0, backend=backend,
    )  # fmt: skip
    key = launch_key(call)
    path = fused_path(call, key)
    if path == "next token":
        return next_token(call, coefficient_cache or CoefficientCache())
    if path == "launch":
        return _launch(call, key)
    return _unfused(call, _finish_by_loops if path == "reference" else _finish)


def _launch(call: Call, key: LaunchKey | None) -> Results:
    if not was_launched(key):
        check_call(call)
    if call.window() == 1:
        call = call._replace(max_rows=0)
    (q_scale, eps), (k_scale, _) = map(gain_and_epsilon, call.norms or (None, None))
    cos, sin = _half_tables(call)
    planned = with_plan(call._replace(cos=cos, sin=sin, q_scale=q_scale, k_scale=k_scale, eps=eps))

    if is_compiling_training():
        q_hat, _ = _finish(call.q, None, call.norms, call.rotary())
        keys_values = planned._replace(q=None, q_scale=None)
        k_hat, v_hat, *next_rows = compiled_to_recompute(
            lambda k, v: tuple(y for y in shift_triton(keys_values._replace(k=k, v=v)) if y is not None),
            call.k,
            cast(Tensor, call.v),
        )
    else:
        q_hat, k_hat, v_hat, *next_rows = cast(tuple[Any, ...], shift_triton(planned, key))
    if call.max_rows == 0:
        return q_hat, k_hat, v_hat, None
    return q_hat, k_hat, v_hat, ShiftState(next_rows[0], next_rows[1], call.rows_to_keep())


def compiled_to_recompute(function: Callable[..., Any], k: Tensor, v: Tensor) -> Any:
    """Call `function`, which shifts k and v, inside a checkpoint, for compiled training.

    The compiler then saves the raw k and v for backward, where the gradients of the coefficients need them anyway, and
    recomputes the shifted ones. Without a compiler, autograd keeps both.
    """
    if not _DDP_TAKES_CHECKPOINTS and DistributedDataParallel._active_ddp_module is not None:
        return function(k, v)
    return checkpoint(function, k, v, use_reentrant=False, preserve_rng_state=False)


def _unfused(call: Call, finish: Callable[..., Any]) -> Results:
    """Shift first, then normalise and rotate with `finish`."""
    q, k, v, new = call.q, call.k, cast(Tensor, call.v), None
    if call.alpha is None and call.beta is None and call.gamma is None:
        check_call(call)
    else:
        # The state holds keys and values even if only queries are shifted.
        k, v, new = shift_keys_values(call._replace(cos=None, sin=None, norms=None))
        if call.gamma is not None and q is not None:
            q, rows = _shift_queries(q, call.gamma, call)
            new = None if new is None else ShiftState(new.k, new.v, new.max_rows, rows)
    return *finish(q, k, call.norms, call.rotary()), v, new


def _shift_queries(q: Tensor, gamma: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    batch, positions = call.k.shape[:2]
    if q.ndim != 4 or q.shape[:3] != (batch, positions, gamma.shape[0]):
        raise ValueError(
            f"q must be ({batch}, {positions}, {gamma.shape[0]}, head size) with these keys, got {tuple(q.shape)}"
        )
    if call.k_state is not None and call.q_state is None:
        raise ValueError("state holds no queries, but this layer shifts them: pass the state that it returned")
    max_rows = call.max_rows or None
    return shift_tokens(q, gamma, state=call.q_state, max_rows=max_rows, backend=call.backend, **call.boundaries())


def _half_tables(call: Call) -> Rotary:
    """Return the rotary tables in the form that the kernels read, (L, T, D/2)."""
    (cos, sin), half = cast(Rotary, call.rotary()), call.k.shape[3] // 2
    if cos.shape[-1] == half:
        return cos.squeeze(2), sin.squeeze(2)
    return cos[:, :, 0, :half], sin[:, :, 0, half:]  # the first half is negated


def _finish(
    q: Tensor | None, k: Tensor | None, norms: Norms | None, rotary: Rotary | None
) -> tuple[Tensor | None, Any]:
    if norms is not None:
        q, k = q if q is None else norms[0](q), k if k is None else norms[1](k)
    if rotary is not None:
        q, k = q if q is None else apply_rotary(q, rotary), k if k is None else apply_rotary(k, rotary)
    return q, k


def _finish_by_loops(
    q: Tensor | None, k: Tensor, norms: Norms | None, rotary: Rotary | None
) -> tuple[Tensor | None, Tensor]:
    of_q, of_k = map(gain_and_epsilon, norms or (None, None))
    return None if q is None else norm_rope_reference(q, *of_q, rotary), norm_rope_reference(k, *of_k, rotary)
