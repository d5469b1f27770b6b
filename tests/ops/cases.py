"""Random calls of the operator with various strides, and their outcomes.

Shapes: B batch, T positions, S sequences, R rows of state, G KV heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvshift.ops import ShiftState, kv_shift

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SUMS = ("gradient of alpha", "gradient of beta")  # sums over all tokens, whose order depends on the backend
LAYOUTS = ("plain", "fused", "heads first", "every other")


@dataclass(frozen=True)
class Case:
    """One call of `kv_shift` and the upstream gradients of its four results."""

    k: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    state: ShiftState | None = None
    cu_seqlens: Tensor | None = None
    seq_idx: Tensor | None = None
    mask: Tensor | None = None
    grads: tuple[Tensor, ...] = ()

    @property
    def window(self) -> int:
        return self.alpha.shape[1]

    def call(self, backend: str, op: Callable = kv_shift) -> tuple[Tensor, Tensor, ShiftState]:
        return op(self.k, self.v, self.alpha, self.beta, state=self.state, **self.where(), backend=backend)

    def where(self) -> dict[str, Tensor | None]:
        return {"cu_seqlens": self.cu_seqlens, "seq_idx": self.seq_idx, "mask": self.mask}

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that may need a gradient, by name."""
        leaves = {"k": self.k, "v": self.v, "alpha": self.alpha, "beta": self.beta}
        return leaves if self.state is None else leaves | {"state.k": self.state.k, "state.v": self.state.v}

    def map(self, fn: Callable[[Tensor], Tensor]) -> Case:
        """Return the same call with `fn` applied to every floating-point tensor."""
        state = self.state and ShiftState(fn(self.state.k), fn(self.state.v), self.state.max_rows)
        k, v, alpha, beta = map(fn, (self.k, self.v, self.alpha, self.beta))
        return replace(self, k=k, v=v, alpha=alpha, beta=beta, state=state, grads=tuple(map(fn, self.grads)))


def random_case(
    seed: int,
    batch: int = 2,
    positions: int = 11,
    *,
    heads: int = 3,
    k_dim: int = 7,
    v_dim: int = 5,
    window: int = 2,
    dtype: torch.dtype = torch.float32,
    coefficient_dtype: torch.dtype = torch.float32,
    rows: int | None = None,
    lengths: Sequence[int] | None = None,
    seq_idx: Sequence[Sequence[int]] | None = None,
    mask: Sequence[Sequence[int]] | None = None,
    layout: str = "plain",
    grad_layout: str = "plain",
) -> Case:
    """Return a call with normally distributed numbers of `dtype`.

    Args:
        rows: Rows of the state; None for no state.
        lengths: Lengths of the sequences that one batch entry packs; None for a batch without packing.
    """
    normal = normal_numbers(seed, dtype)
    if lengths is not None:
        batch, positions = 1, sum(lengths)
    sequences = batch if lengths is None else len(lengths)
    k, v = normal(batch, positions, heads, k_dim), normal(batch, positions, heads, v_dim)
    state = None
    if rows is not None:
        state = ShiftState(normal(sequences, rows, heads, k_dim), normal(sequences, rows, heads, v_dim), rows)
    kept = window - 1 if rows is None else rows
    grads = [
        spread(normal(1), x.shape) if grad_layout == "expanded" else lay_out(normal(*x.shape), grad_layout)
        for x in (k, v, k.new_empty(sequences, kept, heads, k_dim), v.new_empty(sequences, kept, heads, v_dim))
    ]
    return Case(
        lay_out(k, layout),
        lay_out(v, layout),
        normal(heads, window, dtype=coefficient_dtype),
        normal(heads, window, dtype=coefficient_dtype),
        state,
        None if lengths is None else boundaries(lengths),
        None if seq_idx is None else torch.tensor(seq_idx, dtype=torch.long).reshape(batch, positions),
        None if mask is None else torch.tensor(mask, dtype=torch.bool).reshape(batch, positions),
        tuple(grads),
    )


def normal_numbers(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return normal(*shape, dtype=dtype), which draws the next numbers of a sequence that depends on the seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return normal


def boundaries(lengths: Sequence[int]) -> Tensor:
    """Return the `cu_seqlens` of sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Return the same numbers with other strides; the memory between them holds NaN."""
    if layout == "plain":
        return x
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other":
        wide = x.new_full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), torch.nan)
        wide[:, ::2] = x
        return wide[:, ::2]
    assert layout == "fused"  # a slice of a joint projection to queries, keys and values
    width = x.shape[2] * x.shape[3]
    wide = x.new_full((*x.shape[:2], 3 + width + 2), torch.nan)
    wide[..., 3 : 3 + width] = x.flatten(2)
    return wide[..., 3 : 3 + width].unflatten(2, x.shape[2:])


def spread(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Expand a single number to `shape` with strides of zero, like the gradient of `.sum()`."""
    return x.reshape(()).expand(shape)


def outcome(case: Case, backend: str, *, through_state: bool = True, op: Callable = kv_shift) -> dict[str, Tensor]:
    """Return all results of a call, by name: outputs, new state, and the gradients of all inputs.

    Args:
        through_state: Whether gradients also flow back through the new state.
        op: `kv_shift` or a compiled version of it.
    """
    case = case.map(lambda x: x.detach())
    leaves = case.leaves()
    for leaf in leaves.values():
        leaf.requires_grad_()
    k_hat, v_hat, new_state = case.call(backend, op)
    results = {"k_hat": k_hat, "v_hat": v_hat, "new_state.k": new_state.k, "new_state.v": new_state.v}
    weighted = list(zip(results, case.grads, strict=True))[: 4 if through_state else 2]
    return with_gradients(results, dict(weighted), leaves)


def with_gradients(
    results: dict[str, Tensor], upstream: dict[str, Tensor], leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the results and, by name, the gradients of the leaves, given those of the results in `upstream`."""
    names = [name for name in upstream if results[name].requires_grad]  # no tokens, no graph
    gradients = tuple(map(torch.zeros_like, leaves.values()))
    if names:
        ys, grads = [results[name] for name in names], [upstream[name] for name in names]
        gradients = torch.autograd.grad(ys, list(leaves.values()), grads, allow_unused=True, materialize_grads=True)
    found = results | {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def assert_same_bits(results: dict[str, Tensor], expected: dict[str, Tensor], *, but: Sequence[str] = ()) -> None:
    """Compare all results of a call, except those named in `but`."""
    for name, result in results.items():
        if name not in but:
            assert torch.equal(result, expected[name]), name
