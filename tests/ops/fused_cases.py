"""Random calls of shift + QK-norm + RoPE, and their outcomes.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvshift.ops import ShiftState
from kvshift.ops.arguments import Call
from kvshift.ops.attention_inputs import Results, shift_norm_rope
from kvshift.ops.rope import half_tables, rotate_half
from kvshift.ops.shift import with_plan
from kvshift.ops.triton.call import shift_triton

from .cases import boundaries, lay_out, normal_numbers, spread

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
) -> FusedCase:
    """Return a call with normally distributed numbers, also in the tables; other arguments as in `random_case`.

    Args:
        queries: Number of query heads H; None for a call without queries.
        tables: Number of tables L.
        shifted: Which of "q", "k" and "v" have coefficients.
    """
    normal = normal_numbers(seed, dtype)
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
    coefficients = [normal(heads, window, dtype=torch.float32) for _ in range(2)]
    table = [normal(tables, positions, k_dim // 2, dtype=table_dtype or dtype) for _ in range(2)]
    scales = [normal(k_dim, dtype=scale_dtype or dtype) for _ in range(2)]
    states = [None if rows is None else normal(sequences, rows, *shape[2:]) for shape in (*shapes[1:], shapes[0])]
    return FusedCase(
        None if queries is None else q,
        k,
        v,
        coefficients[0] if "k" in shifted else None,
        coefficients[1] if "v" in shifted else None,
        *table,
        *(scales if norm else ()),
        eps=0.25 if norm else 0.0,
        k_state=states[0],
        v_state=states[1],
        q_state=states[2] if "q" in shifted else None,
        gamma=normal(queries or 0, window, dtype=torch.float32) if "q" in shifted else None,
        cu_seqlens=None if lengths is None else boundaries(lengths),
        seq_idx=None if seq_idx is None else torch.tensor(seq_idx, dtype=torch.long),
        mask=None if mask is None else torch.tensor(mask, dtype=torch.bool),
        grads=tuple(grads),
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
    return shift_triton(call_of(case), case.k.shape[0])[:3]


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


def unfused(case: FusedCase) -> Outputs:
    """Apply plain PyTorch operations one by one, in the dtype of the tensors, without boundaries or state."""
    table = half_tables(case.cos.repeat(1, 1, 2), case.sin.repeat(1, 1, 2))

    def shift(x: Tensor, coefficients: Tensor | None) -> Tensor:
        if coefficients is None:
            return x
        lags = (F.pad(x, (0, 0, 0, 0, lag, 0))[:, : x.shape[1]] for lag in range(coefficients.shape[1]))
        weights = coefficients.to(x.dtype).unsqueeze(2).unbind(1)
        return cast(Tensor, sum(weight * before for weight, before in zip(weights, lags, strict=True)))

    def finish(x: Tensor, scale: Tensor | None) -> Tensor:
        return rotate_half(x if scale is None else F.rms_norm(x, scale.shape, scale, case.eps), table)

    q = None if case.q is None else finish(case.q, case.q_scale)
    return q, finish(shift(case.k, case.alpha), case.k_scale), shift(case.v, case.beta)


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
    if state is not None:
        found |= {"new state of k": state.k, "new state of v": state.v, "new state of q": state.q}
    found = {name: x for name, x in found.items() if x is not None}
    results = {name: x.detach() for name, x in found.items()}
    if record:
        generator = torch.Generator().manual_seed(1)
        upstream = dict(zip("qkv", case.grads, strict=True))
        upstream |= {
            name: torch.randn(x.shape, generator=generator).to(x) for name, x in results.items() if "new" in name
        }
        ys, grads = zip(*((x, upstream[name]) for name, x in found.items() if x.requires_grad), strict=True)
        given = torch.autograd.grad(ys, list(leaves.values()), grads, allow_unused=True, materialize_grads=True)
        results |= {f"gradient of {name}": x for name, x in zip(leaves, given, strict=True)}
    return results
