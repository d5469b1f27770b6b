"""Cases of the compiled kernel of the next token, and the separate operations whose bits it must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvshift.ops.arguments import Call, Gains
from kvshift.ops.cpu.next_token import NextToken, TokenTables
from kvshift.ops.decode import CoefficientCache, next_token
from kvshift.ops.rope import half_tables
from kvshift.ops.state import ShiftState

UNTOUCHED = 7.0  # around the cache
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tokens of random numbers. `packed`: q, k and v are parts of one projection. `zeros`: some coefficients are 0."""

    dtype: torch.dtype = torch.float32
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    size: int = 20
    v_size: int = 20
    tables: int = 1
    targets: str = "kv"
    norm: bool = False
    zeros: bool = False
    packed: bool = False
    tokens: int = 4
    room: int = 6
    counted: bool = False


@torch.no_grad()
def inputs(case: Case) -> dict[str, Any]:
    """Return the arguments of all tokens."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    batch, kv_heads, (size, v_size) = case.batch, case.kv_heads, (case.size, case.v_size)
    given: dict[str, Any] = {"tokens": [], "tables": []}
    for _ in range(case.tokens):
        shapes = ((batch, 1, heads, n) for heads, n in ((case.heads, size), (kv_heads, size), (kv_heads, v_size)))
        heads = [normal(*shape) for shape in shapes]
        if case.packed:
            assert size == v_size
            heads = list(torch.cat(heads, 2).split((case.heads, kv_heads, kv_heads), 2))
        given["tokens"].append(heads)
        angle = (normal(case.tables, 1, size // 2, dtype=torch.float32) * 3).repeat(1, 1, 2)
        cos, sin = angle.cos(), angle.sin()
        given["tables"].append((cos.to(case.dtype), sin.to(case.dtype)))
    rows = normal(batch, 1, kv_heads, size), normal(batch, 1, kv_heads, v_size)
    alpha, beta = (
        normal(kv_heads, 2, dtype=torch.float32) if target in case.targets else None for target in ("k", "v")
    )
    if case.zeros:
        for coefficients, x, state in ((alpha, 1, rows[0]), (beta, 2, rows[1])):
            if coefficients is None:
                continue
            coefficients[0, 1] = coefficients[-1, 0] = 0
            state[:, :, 0] = torch.inf  # not read
            given["tokens"][-1][x][:, :, -1] = -torch.inf  # nor this
    given |= {"rows": rows if case.targets else None, "alpha": alpha, "beta": beta, "norms": None}
    if case.norm:
        given["norms"] = LlamaRMSNorm(size, EPS), LlamaRMSNorm(size, EPS)
        for norm in given["norms"]:
            norm.weight = torch.nn.Parameter(normal(size), requires_grad=False)
    return given


@torch.no_grad()
def by_operations(case: Case) -> list[Tensor]:
    """Return q of every token, then the cached keys and values and the state, from separate operations."""
    given = inputs(case)
    rows = given["rows"] or (None, None)
    qs, keys, values = [], [], []
    for (q, k, v), tables in zip(given["tokens"], given["tables"], strict=True):
        cos, sin = half_tables(*tables)
        more: dict[str, Any] = {"norms": given["norms"], "max_rows": 1 if case.targets else 0}
        call = Call(q, k, v, given["alpha"], given["beta"], *rows, cos, sin, **more)
        q_hat, k_hat, v_hat, _ = next_token(call, CoefficientCache())
        qs.append(q_hat.transpose(1, 2))
        keys.append(k_hat.transpose(1, 2))
        values.append(v_hat.transpose(1, 2))
        rows = (k, v) if rows[0] is not None else rows
    return [*qs, torch.cat(keys, 2), torch.cat(values, 2), *(row for row in rows if row is not None)]


def gains_of(norms: Any) -> Gains:
    return (None, None, 0.0) if norms is None else (norms[0].weight, norms[1].weight, norms[0].variance_epsilon)


def prepared(case: Case, given: dict[str, Any]) -> NextToken:
    state = None if given["rows"] is None else ShiftState(*(row.clone() for row in given["rows"]), 1)
    return NextToken(*given["tokens"][0], state, given["alpha"], given["beta"], gains_of(given["norms"]))


@torch.no_grad()
def by_kernel(case: Case) -> list[Tensor]:
    """Return the same from the kernel; it is an error if anything but these rows of the cache is written."""
    given = inputs(case)
    call = prepared(case, given)
    whole = [
        torch.full((case.batch, case.kv_heads, case.room + 2, size), UNTOUCHED, dtype=case.dtype)
        for size in (case.size, case.v_size)
    ]
    length = torch.zeros((), dtype=torch.int64) if case.counted else None
    assert call.write_to(*(x[:, :, 1:-1] for x in whole), length)
    qs = []
    for at, (heads, rotary) in enumerate(zip(given["tokens"], given["tables"], strict=True)):
        tables = TokenTables(rotary)
        assert call.takes(*heads, tables)
        qs.append(call(*heads, tables, 0 if case.counted else at))
    assert length is None or int(length) == case.tokens
    for x in whole:
        untouched = torch.cat([x[:, :, :1], x[:, :, case.tokens + 1 :]], 2)
        assert (untouched == UNTOUCHED).all(), "written outside"
    cached = [x[:, :, 1 : case.tokens + 1] for x in whole]
    return [*qs, *cached, *(() if call.state is None else (call.state.k, call.state.v))]


def check(case: Case) -> None:
    """Raise an AssertionError unless kernel and operations agree bit for bit."""
    expected = by_operations(case)
    for i, (x, y) in enumerate(zip(by_kernel(case), expected, strict=True)):
        assert torch.equal(x, y), f"result {i} of {len(expected)}"
