"""Random calls of shift + QK-norm + RoPE, and their outcomes.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvshift.ops import ShiftState
from kvshift.ops.arguments import Call
from kvshift.ops.attention_inputs import Results, shift_norm_rope
from kvshift.ops.rope import half_tables
from kvshift.ops.shift import with_plan
from kvshift.ops.triton.call import shift_triton

from .cases import lay_out, normal_numbers, random_case, spread, with_gradients

Outputs = tuple[Tensor | None, Tensor, Tensor]
LEAVES = ("q", "k", "v", "alpha", "beta", "q_scale", "k_scale")  # differentiable inputs of the launch
_LEAVES = (*LEAVES, "gamma", "k_state", "v_state", "q_state")
_NUMBERS = (*_LEAVES, "cos", "sin")
HOLES = [[0, 1, 0, 1, 1], [1, 1, 1, 0, 0]]
DOCUMENTS = [[0, 0, 1, 1, 1], [7, -1, -1, -1, 7]]
MODES: dict[str, dict] = {
    "plain": {},
    "tables of each row": {"tables": 2},
    "tables and gains in fp32": {"table_dtype": torch.float32, "scale_dtype": torch.float32},
    "window 3": {"window": 3},
    "window 4": {"window": 4, "positions": 6},
    "keys alone": {"shifted": "k", "window": 3},
    "values alone": {"shifted": "v"},
    "no shift": {"shifted": ""},
    "no queries": {"queries": None},
    "heads of several programs": {"queries": 9, "heads": 5, "positions": 2},
    "heads of two": {"k_dim": 2, "v_dim": 1},
    "heads of 96": {"k_dim": 96, "v_dim": 33, "queries": 2, "heads": 1, "positions": 3},
    "one token": {"positions": 1, "window": 3},
    "pack": {"lengths": [2, 0, 1, 3]},
    "pack, window 4": {"lengths": [1, 4, 0, 2], "window": 4},
    "pack, padding": {"lengths": [2, 3], "mask": [[1, 0, 0, 1, 1]]},
    "documents": {"seq_idx": DOCUMENTS, "window": 3},
    "padding": {"mask": HOLES, "window": 3},
    "padding, values alone": {"mask": HOLES, "shifted": "v"},
    "documents, padding": {"seq_idx": DOCUMENTS, "mask": HOLES, "tables": 2},
    "nothing but padding": {"mask": [[0] * 5, [0, 0, 0, 0, 1]]},
}
WITH_STATE: dict[str, dict] = {
    "rows": {"rows": 3, "window": 3},
    "pack": {"lengths": [2, 0, 1, 3], "rows": 2},
    "documents": {"seq_idx": DOCUMENTS, "rows": 3, "window": 4},
    "padding": {"mask": HOLES, "rows": 2, "window": 3},
    "keys alone": {"rows": 1, "shifted": "k"},
    "one token": {"positions": 1, "rows": 3, "window": 4},
}
NOTHING: dict[str, dict] = {
    "no sequence": {"batch": 0},
    "no position": {"positions": 0},
    "pack of nothing": {"lengths": []},
    "pack of empty sequences": {"lengths": [0, 0]},
}


@dataclass(frozen=True)
class FusedCase:
    """One call of `shift_norm_rope` or of its launch, and the upstream gradients of its three results."""

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
    k_state: Tensor | None = None
    v_state: Tensor | None = None
    q_state: Tensor | None = None
    gamma: Tensor | None = None
    cu_seqlens: Tensor | None = None
    seq_idx: Tensor | None = None
    mask: Tensor | None = None
    grads: tuple[Tensor, ...] = ()

    def where(self) -> dict[str, Any]:
        return {"cu_seqlens": self.cu_seqlens, "seq_idx": self.seq_idx, "mask": self.mask}

    def map(self, fn: Callable[[Tensor], Tensor]) -> FusedCase:
        """Return the same call with `fn` applied to every floating-point tensor."""
        changed: dict[str, Any] = {name: fn(x) for name in _NUMBERS if (x := getattr(self, name)) is not None}
        return replace(self, **changed, grads=tuple(map(fn, self.grads)))


def random_fused(
    seed: int,
    batch: int = 2,
    positions: int = 5,
    *,
    queries: int | None = 5,
    k_dim: int = 6,
    v_dim: int = 7,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    tables: int = 1,
    norm: bool = True,
    shifted: str = "kv",
    layout: str = "plain",
    grad_layout: str = "plain",
    **others: Any,
) -> FusedCase:
    """Return a call with normally distributed numbers, also in the tables; other arguments as in `random_case`.

    Args:
        queries: Number of query heads H; None for a call without queries.
        tables: Number of tables L.
        shifted: Which of "q", "k" and "v" have coefficients.
    """
    layouts = {"layout": layout, "grad_layout": grad_layout}
    case = random_case(seed, batch, positions, k_dim=k_dim, v_dim=v_dim, dtype=dtype, **layouts, **others)
    normal, state, (batch, positions) = normal_numbers(seed + 1, dtype), case.state, case.k.shape[:2]
    q = normal(batch, positions, queries or 0, k_dim)
    grad = spread(normal(1), q.shape) if grad_layout == "expanded" else lay_out(normal(*q.shape), grad_layout)
    table = [normal(tables, positions, k_dim // 2, dtype=table_dtype or dtype) for _ in range(2)]
    scales = [normal(k_dim, dtype=scale_dtype or dtype) for _ in range(2)]
    return FusedCase(
        None if queries is None else lay_out(q, layout),
        case.k,
        case.v,
        case.alpha if "k" in shifted else None,
        case.beta if "v" in shifted else None,
        *table,
        *(scales if norm else ()),
        eps=0.25 if norm else 0.0,
        k_state=None if state is None else state.k,
        v_state=None if state is None else state.v,
        q_state=normal(*state.k.shape[:2], *q.shape[2:]) if state is not None and "q" in shifted else None,
        gamma=normal(q.shape[2], case.window, dtype=torch.float32) if "q" in shifted else None,
        **case.where(),
        grads=(grad, *case.grads[:2]),
    )


def call_of(case: FusedCase) -> Call:
    """Return the case as the `Call` that the kernels receive."""
    return with_plan(
        Call(
            case.q, case.k, case.v, case.alpha, case.beta, case.k_state, case.v_state,
            case.cos, case.sin, case.q_scale, case.k_scale, **case.where(), eps=case.eps, max_rows=0,
        )
    )  # fmt: skip


def launched(case: FusedCase) -> Outputs:
    """Run the case through the Triton kernels; return q, k and v."""
    return shift_triton(call_of(case))[:3]


def fused(
    case: FusedCase,
    backend: str,
    *,
    full_tables: bool = False,
    kind: type[nn.Module] = nn.RMSNorm,
    op: Callable[..., Results] = shift_norm_rope,
    **options: Any,
) -> Results:
    """Compute the case by `op`, with tables as wide as a head or half as wide, and with norms of this kind."""
    rotary = case.cos.unsqueeze(2), case.sin.unsqueeze(2)
    if full_tables:
        rotary = half_tables(case.cos.repeat(1, 1, 2), case.sin.repeat(1, 1, 2))
    norms = None
    if case.q_scale is not None and case.k_scale is not None:
        norms = _norm(kind, case.q_scale, case.eps), _norm(kind, case.k_scale, case.eps)
    state = None
    if case.k_state is not None and case.v_state is not None:
        state = ShiftState(case.k_state, case.v_state, case.k_state.shape[1], case.q_state)
    return op(
        case.q, case.k, case.v, case.alpha, case.beta, case.gamma, rotary=rotary, norms=norms, state=state,
        **case.where(), backend=backend, **options,
    )  # fmt: skip


def _norm(kind: type[nn.Module], scale: Tensor, eps: float) -> nn.Module:
    """Return a norm of this kind whose gain is this tensor itself."""
    norm = kind(scale.shape[0], eps=eps)
    del norm.weight
    norm.weight = scale
    return norm


def by_loops(case: FusedCase) -> Results:
    return fused(case, "reference")


def without_state(case: FusedCase) -> Outputs:
    """Compute q, k and v by the reference."""
    return by_loops(case)[:3]


def outcome(
    case: FusedCase, op: Callable[[FusedCase], tuple] = launched, *, gradients: bool | None = None
) -> dict[str, Tensor]:
    """Return all results of a call, by name: outputs, new state, and the gradients of all inputs.

    Args:
        op: Returns q, k, v, and a new state if it makes one.
        gradients: Whether to record gradients, including those of the state; by default, if the case has no state.
    """
    case = case.map(lambda x: x.detach())
    leaves = {name: x for name in _LEAVES if (x := getattr(case, name)) is not None}
    record = case.k_state is None if gradients is None else gradients
    for x in leaves.values() if record else ():
        x.requires_grad_()
    *outputs, state = (*op(case), None)[:4]
    found = dict(zip("qkv", outputs, strict=True))
    upstream = {name: grad for name, grad in zip("qkv", case.grads, strict=True) if found[name] is not None}
    if state is not None:
        found |= {"new state of k": state.k, "new state of v": state.v, "new state of q": state.q}
    results: dict[str, Tensor] = {name: x for name, x in found.items() if x is not None}
    if not record:
        return results
    generator = torch.Generator().manual_seed(1)
    states = [name for name in results if "new" in name]
    upstream |= {name: torch.randn(results[name].shape, generator=generator).to(results[name]) for name in states}
    return with_gradients(results, upstream, leaves)
