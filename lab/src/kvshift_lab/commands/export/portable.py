"""Definitions for exported model code that replace the package's choice among implementations by PyTorch operations.

Each definition replaces the one of the same name in the module that `REPLACED` names. It computes the same result with
the traceable operations of `kvshift.ops.torch_ops`, which autograd differentiates: there are no kernels, no custom
backward and no recomputation. Arguments that a model has created itself are not checked again. Parallelism that splits
sequences is not checked for either (`refuse_sharded_sequence`), to keep the longest file within its limit of lines.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from kvshift.layers import KVShift
from kvshift.models.decoder import Finish
from kvshift.ops.arguments import Norms
from kvshift.ops.attention_inputs import Results, _finish
from kvshift.ops.boundaries import plan_shift
from kvshift.ops.rope import Rotary
from kvshift.ops.state import ShiftState
from kvshift.ops.torch_ops import shift_traceable, state_after

REPLACED = {
    "CoefficientCache": "kvshift.ops.decode",
    "refuse_sharded_sequence": "kvshift.layers.sequence_sharding",
    "shift_norm_rope": "kvshift.ops.attention_inputs",
    "shift_and_cache": "kvshift.models.decoder",
    "prepare_next_token": "kvshift.models.next_token",
    "_shareable": "kvshift.ops.boundaries",
    "shared_plans": "kvshift.ops.boundaries",
}
"""Names of definitions in this module, and the modules whose definitions they replace."""

DROPPED = {
    "KVShift": ("coefficients", "coefficients_alone", "extra_repr"),
    "ShiftCacheLayer": ("__getstate__",),
    "ShiftOptions": ("as_fields",),
    "ShiftStaticLayer": ("update",),
    "SequenceState": ("__eq__", "__hash__", "reorder", "to", "detach"),
    "ShiftState": ("zeros", "split", "stack"),
}
"""Members to leave out, by class: models do not call them, or compute the same result without them."""


def refuse_sharded_sequence() -> None:
    """Do nothing: this file does not detect parallelism that divides sequences."""


shared_plans = nullcontext  # every layer makes its own plan


def _shareable(plan: Any) -> Any:
    return plan


def prepare_next_token(decoder: Any, hidden_states: Tensor, tables: Any, masks: Any, *_: Any) -> tuple[dict, Any]:
    """Prepare nothing: without the compiled kernel, the next token is computed like others."""
    return {}, masks


class CoefficientCache:
    """A cache of coefficients that keeps nothing between tokens."""


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
    """Shift, then normalise queries and keys, then rotate them. For the arguments, see `KVShift.forward`."""
    if backend != "auto":
        raise ValueError(f'backend must be "auto": this file has one implementation; got {backend!r}')
    coefficients, new = (gamma, alpha, beta), None
    window = next((x.shape[1] for x in coefficients if x is not None), 1)
    if window > 1:
        sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        inputs = (k if q is None else q, k, v)
        before = (None, None, None) if state is None else (state.q, state.k, state.v)
        states = [
            x.new_zeros(sequences, window - 1, *x.shape[2:]) if rows is None else rows
            for x, rows in zip(inputs, before, strict=True)
        ]
        rows, plan = states[1].shape[1], None
        if cu_seqlens is not None or seq_idx is not None or mask is not None:
            where: dict[str, Any] = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "mask": mask}
            plan = plan_shift(k.shape[0], k.shape[1], window, rows, k.device, **where)
        if keep_state:
            most = window - 1 if state is None else state.max_rows
            after = [state_after(x, old, plan, most) for x, old in zip(inputs, states, strict=True)]
            new = ShiftState(after[1], after[2], most, None if gamma is None else after[0])
        shifted = [
            x if c is None else shift_traceable(x, c, rows, plan)
            for x, c, rows in zip(inputs, coefficients, states, strict=True)
        ]
        q, k, v = None if q is None else shifted[0], shifted[1], shifted[2]
    return *_finish(q, k, norms, rotary), v, new


def shift_and_cache(
    shift: KVShift,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache | None,
    layer_idx: int,
    *,
    mask: Tensor | None,
    seq_idx: Tensor | None,
    rotary: Rotary | None = None,
    norms: Norms | None = None,
    finish: Finish | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift q, k and v of one layer, apply norms and rotation, and append k and v to the cache.

    `finish`, if given, is applied to shifted q and k in place of `rotary` and `norms`. Returns q (B, H, T, D),
    and k and v (B, G, length, D) including the cached ones.
    """
    where: dict[str, Any] = {"mask": mask, "seq_idx": seq_idx, "rotary": rotary, "norms": norms}
    if cache is None or not shift.targets:
        q, k, v, _ = shift(q, k, v, keep_state=False, **where)
    else:
        layer: Any = cache.layers[layer_idx]
        q, k, v = layer.shift_tokens(shift, q, k, v, **where)
    if finish is not None:
        q, k = finish(q, k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, *((k, v) if cache is None else cache.update(k, v, layer_idx))
